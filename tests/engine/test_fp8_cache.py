"""A KV cache in e4m3: half of bf16's memory, and answers of keys and values rounded to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift import loader
from chairlift.attention import LayerShape, StepBatch
from chairlift.attention_torch import TorchAttention
from chairlift.config import EngineConfig
from chairlift.kv_scales import LayerScales, read_scales
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


@pytest.fixture(scope="module")
def in_e4m3(folder: Path) -> Harness:
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="triton"))
    return Harness(loaded, kv_cache_dtype="fp8", **SETTINGS)


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
    folder: Path, in_e4m3: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scores(in_e4m3)
    plain = loader.load(EngineConfig(model=str(folder), attention_backend="torch"))
    exact_harness = Harness(plain, **SETTINGS)
    exact = scores(exact_harness)
    monkeypatch.setattr("chairlift.backends.TorchAttention", Rounding)
    expected = scores(Harness(plain, **SETTINGS))
    assert len(found) == len(PROMPT) - 1
    assert (found - exact).abs().max() > 0.1, "nothing was rounded"
    assert torch.allclose(found, expected, atol=1e-3)
    pool, wide = in_e4m3.assembly.pool, exact_harness.assembly.pool
    assert pool.num_bytes * plain.dtype.itemsize == wide.num_bytes


def with_larger_keys(folder: Path, factor: float, target: Path) -> Path:
    """The same model in exact arithmetic: keys times ``factor``, queries divided by it."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if "k_proj" in name:
            weight *= factor
        elif "q_proj" in name:
            weight /= factor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_scales_keep_what_would_be_clamped(folder: Path, in_e4m3: Harness, tmp_path: Path) -> None:
    """With them answers are those of keys that fit in e4m3; without them they are not."""
    factor = 2.0**12
    (tmp_path / "scales.json").write_text(json.dumps({"k": [factor], "v": [[1, 1.0]]}))
    expected = scores(in_e4m3)
    large = with_larger_keys(folder, factor, tmp_path / "large")
    loaded = loader.load(EngineConfig(model=str(large), attention_backend="triton"))
    scales = {"kv_cache_scales": str(tmp_path / "scales.json")}
    found = scores(Harness(loaded, kv_cache_dtype="fp8", **scales, **SETTINGS))
    clamped = scores(Harness(loaded, kv_cache_dtype="fp8", **SETTINGS))
    assert torch.allclose(found, expected, atol=1e-3)
    assert (clamped - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"k": [1, 1, 1], "v": [1, 1]}', "'k' has scales for 3 layers, the model has 2"),
        ('{"k": [1, 1], "v": [1]}', "'v' has scales for 1 layers, the model has 2"),
        ('{"k": [1, [1, 2, 3]], "v": [1, 1]}', "'k' has 3 scales for layer 1, which has 2 KV"),
        ('{"k": [1, [1, 0]], "v": [1, 1]}', "'k' of layer 1: .* greater than"),
        ('{"k": [1, 1], "v": [-1, 1]}', "'v' of layer 0: .* greater than"),
        ('{"k": [1, 1e-40], "v": [1, 1]}', "'k' of layer 1: "),
        ('{"k": [1, NaN], "v": [1, 1]}', "'k' of layer 1: "),
        ('{"k": [1, "2"], "v": [1, 1]}', "'k' of layer 1: .* valid number"),
        ('{"k": [1, []], "v": [1, 1]}', "'k' has 0 scales for layer 1"),
        ('{"k": [1, 1], "v": [1, 1], "q": [1, 1]}', "'q': Extra inputs"),
        ('{"k": [1, 1]}', "'v': Field required"),
        ("[1, 2]", "scales.json: "),
        ("k: 1", "scales.json: Invalid JSON"),
    ],
)
def test_scales_that_do_not_fit_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"setting 'kv_cache_scales': .*{words}"):
        read_scales(path, [LayerShape(2, 16, 16)] * 2)


def test_a_file_of_scales_must_be_there_and_be_wanted() -> None:
    with pytest.raises(ValueError, match="'kv_cache_scales': /no/file: No such file"):
        read_scales(Path("/no/file"), [])
    with pytest.raises(ValueError, match="kv_cache_scales are for kv_cache_dtype 'fp8' alone"):
        EngineConfig(kv_cache_scales="scales.json")


def test_scales_of_a_layer_or_of_its_heads(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text('{"k": [0.5, [1, 2]], "v": [[3, 4], 5]}')
    assert read_scales(path, [LayerShape(2, 16, 16)] * 2) == [
        LayerScales([0.5, 0.5], [3.0, 4.0]),
        LayerScales([1.0, 2.0], [5.0, 5.0]),
    ]


def test_other_backends_refuse_it(folder: Path) -> None:
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="torch"))
    with pytest.raises(ValueError, match="'fp8' needs the Triton-lang kernels"):
        Harness(loaded, kv_cache_dtype="fp8", num_kv_blocks=8)
