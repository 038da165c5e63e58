"""The default on a CPU: bf16 weights and cache, every layer in one kernel call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from tests.engine.harness import GREEDY, Harness

ANSWER = replace(GREEDY, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def bf16(smollm2_dir: Path) -> LoadedModel:
    return loader.load(EngineConfig(model=str(smollm2_dir)))


def test_steps_that_sample_nobody(bf16: LoadedModel, english: list[int]) -> None:
    """A chunk in the middle of a prompt has no logits; the answer is that of the whole prompt."""
    prompts = [english[300:380], english[500:630]]
    whole = Harness(bf16, num_kv_blocks=60).generate(prompts, ANSWER)
    chunked = Harness(bf16, num_kv_blocks=60, max_num_batched_tokens=16, max_num_seqs=4)
    assert chunked.generate(prompts, ANSWER) == whole
    assert any(not s.num_decodes and s.num_prefill_tokens == 16 for s in chunked.stats)


def test_an_answer_does_not_depend_on_its_batch(bf16: LoadedModel, english: list[int]) -> None:
    prompts = [english[70 * i : 70 * i + 20 + 7 * i] for i in range(8)]
    alone = [Harness(bf16, num_kv_blocks=60).generate([prompt], ANSWER)[0] for prompt in prompts]
    assert Harness(bf16, num_kv_blocks=100).generate(prompts, ANSWER) == alone
