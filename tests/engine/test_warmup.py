"""Warm-up at load asks for every kernel that requests can need (A7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import assembly, loader
from chairlift.attention import StepBatch
from chairlift.attention_torch import TorchAttention
from chairlift.config import EngineConfig
from chairlift.request import SamplingParams
from chairlift.warmup import FIRST_STEPS, WarmStep
from chairlift_kernels import attention
from tests.engine.harness import Harness
from tests.engine.kernel_launches import recorded
from tests.engine.tiny_models import build

# In place of 512, so that the interpreter needs no long contexts to meet a second split.
SPLIT_KEYS = 16


def test_a7_no_request_meets_a_kernel_that_warm_up_has_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one and more, prompts around 16, two splits, forks, all that sampling does.

    Whatever the memory held before: here it is full of NaN.
    """
    monkeypatch.setattr(attention, "SPLIT_KEYS", SPLIT_KEYS)
    monkeypatch.setattr(torch, "empty", _used_memory(torch.empty))
    folder = build(tmp_path / "llama", "llama", num_hidden_layers=1)
    loaded = loader.load(EngineConfig(model=str(folder), attention_backend="triton"))
    with recorded() as warm:
        harness = Harness(loaded, num_kv_blocks=20, max_num_seqs=4, max_num_batched_tokens=20)
    with recorded() as served:
        harness.generate([[1]], SamplingParams(temperature=0.0, max_tokens=2))
        for length, params in (
            (1, SamplingParams(temperature=1.0, max_tokens=3, n=2)),
            (15, SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=4)),
            (16, SamplingParams(temperature=0.0, max_tokens=2, logprobs=2)),
            (17, SamplingParams(temperature=0.0, max_tokens=2, repetition_penalty=1.2)),
            (18, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)),
        ):
            harness.submit([3] * length, params)
        harness.run()
    names = {form[0] for form in served}
    assert names >= {
        "paged_attention_kernel", "merge_splits_kernel", "block_copy_kernel", "penalties_kernel",
        "token_logprob_kernel", "merge_top_kernel",
    }  # fmt: skip
    unforeseen = served - warm
    assert not unforeseen, sorted({form[0] for form in unforeseen})


def _used_memory(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.empty`` where other tensors have been before."""

    def used(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    return used


def test_the_largest_step_is_as_long_as_it_is_wide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes at its peak is kept free, so no step of a request may take more."""
    seen: list[StepBatch] = []
    attend = TorchAttention.attend

    def noting(self: TorchAttention, layer: int, query: Any, batch: Any, options: Any) -> Any:
        seen.append(batch)
        return attend(self, layer, query, batch, options)

    monkeypatch.setattr(TorchAttention, "attend", noting)
    folder = build(tmp_path / "llama", "llama", num_hidden_layers=1)
    config = EngineConfig(
        model=str(folder), attention_backend="torch", max_model_len=40, max_num_seqs=3,
        max_num_batched_tokens=24,
    )  # fmt: skip
    loaded = loader.load(config)
    seen.clear()
    assembly._largest_step(config, loaded)
    (batch,) = seen
    assert batch.seq_lens.tolist() == [40, 40, 22]
    assert (batch.max_seq_len, len(batch.input_ids), len(batch.logit_rows)) == (40, 24, 3)


def test_a_warm_step_needs_few_blocks_however_long_its_context_is() -> None:
    step = WarmStep(1, 0, context=513)
    (row,) = step.plan(16).rows
    assert step.blocks_needed(16) == 2
    assert row.start == 512 and row.request.block_ids == [1] * 33


def test_the_first_steps_use_blocks_of_their_own() -> None:
    for step in FIRST_STEPS:
        plan = step.plan(4)
        used = [block for row in plan.rows for block in row.request.block_ids]
        assert len(set(used)) == len(used) == step.blocks_needed(4) - 1
        assert 0 not in used
