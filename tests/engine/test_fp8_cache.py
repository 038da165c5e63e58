"""A KV cache in e4m3: half of bf16's memory, and answers of keys and values rounded to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift import loader
from chairlift.attention import StepBatch
from chairlift.attention_torch import TorchAttention
from chairlift.config import EngineConfig
from chairlift.request import SamplingParams
from chairlift_kernels.ops import TritonOps
from tests.engine.harness import Harness
from tests.engine.tiny_models import build

PROMPT = list(range(20))
SETTINGS: dict[str, Any] = {"num_kv_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "llama", "llama", num_hidden_layers=1)


def scores(harness: Harness) -> Tensor:
    """Log-probabilities of the prompt's tokens, over two chunks of it."""
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    uid = harness.submit(PROMPT, params)
    harness.run()
    return torch.tensor([each.chosen for each in harness.answers[uid].prompt_logprobs])


class Rounding(TorchAttention):
    """The reference backend, over keys and values that were in an e4m3 cache once.

    A cache of the kernels rounds them: the interpreter takes some to the wrong neighbour.
    """

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        super().write(layer, rounded(key), rounded(value), batch)


def rounded(x: Tensor) -> Tensor:
    """[T, heads, D]"""
    capability = None if x.is_cuda else (9, 0)
    cache = TritonOps(x.device, capability).allocate_cache(
        [(*x.shape[1:], x.shape[2])], len(x), 1, torch.float8_e4m3fn
    )
    cache.write(0, x, x, torch.arange(len(x), device=x.device))
    return cache.layers[0].keys.to(x.dtype).flatten(0, 1)


def test_the_model_reads_what_was_rounded_to_e4m3(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="triton"))
    harness = Harness(loaded, kv_cache_dtype="fp8", **SETTINGS)
    found = scores(harness)
    plain = loader.load(EngineConfig(model=str(folder), attention_backend="torch"))
    exact_harness = Harness(plain, **SETTINGS)
    exact = scores(exact_harness)
    monkeypatch.setattr("chairlift.backends.TorchAttention", Rounding)
    expected = scores(Harness(plain, **SETTINGS))
    assert len(found) == len(PROMPT) - 1
    assert (found - exact).abs().max() > 0.1, "nothing was rounded"
    assert torch.allclose(found, expected, atol=1e-3)
    pool, wide = harness.assembly.pool, exact_harness.assembly.pool
    assert pool.num_bytes * plain.dtype.itemsize == wide.num_bytes


def test_other_backends_refuse_it(folder: Path) -> None:
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="torch"))
    with pytest.raises(ValueError, match="'fp8' needs the Triton-lang kernels"):
        Harness(loaded, kv_cache_dtype="fp8", num_kv_blocks=8)
