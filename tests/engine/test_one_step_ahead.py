"""The runner's side of one step ahead: a drawn token reaches the next step on the device."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from chairlift.request import SamplingParams
from tests.engine.harness import Answer, Harness
from tests.engine.replayed import Recorder
from tests.engine.tiny_models import VOCAB_SIZE, build

KINDS = [
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=1.0, max_tokens=25),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=15),
    SamplingParams(temperature=1.2, top_k=5, min_p=0.05, max_tokens=30),
    SamplingParams(temperature=0.7, max_tokens=12, logit_bias=((5, 2.0),)),
    SamplingParams(temperature=0.7, max_tokens=12, stop_token_ids=(1, 2, 3, 4)),
]
SPECIAL = [
    SamplingParams(temperature=1.0, max_tokens=9, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=9, repetition_penalty=1.3, min_tokens=3),
    SamplingParams(temperature=1.0, max_tokens=9, n=3),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = build(tmp_path_factory.mktemp("models") / "llama", "llama")
    return loader.load(EngineConfig(model=str(folder), attention_backend="torch"))


def answers(
    tiny: LoadedModel, one_step_ahead: str, kinds: list[SamplingParams], num_kv_blocks: int
) -> list[Answer]:
    harness = Harness(
        tiny,
        one_step_ahead=one_step_ahead,
        num_kv_blocks=num_kv_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        kv_reserve_fraction=0.0,
    )
    rng = random.Random(3)
    uids = []
    for index in range(14):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 60))]
        uids.append(harness.submit(prompt, rng.choice(kinds), seed=index))
    harness.run()
    if num_kv_blocks < 20:
        assert harness.scheduler.num_preemptions > 0
    return [harness.answers[uid] for uid in uids]


@pytest.mark.parametrize(("setting", "num_calls"), [("auto", 4), ("off", 0)])
def test_graphs_are_captured_unless_they_are_off(
    tiny: LoadedModel, setting: str, num_calls: int
) -> None:
    """One per row count; one length, as the model knows no longer one."""
    recorder = Recorder()
    Harness(tiny, recorder, cuda_graphs=setting, num_kv_blocks=20, max_num_seqs=6)
    assert len(recorder.calls) == num_calls


@pytest.mark.parametrize("num_kv_blocks", [14, 60])
@pytest.mark.parametrize("kinds", [KINDS, KINDS + SPECIAL], ids=["plain", "with special ones"])
def test_the_same_tokens_with_and_without(
    tiny: LoadedModel, kinds: list[SamplingParams], num_kv_blocks: int
) -> None:
    """Requests meet others in their batches, so log-probabilities may differ by a rounding."""
    ahead = answers(tiny, "on", kinds, num_kv_blocks)
    behind = answers(tiny, "off", kinds, num_kv_blocks)
    assert [replace(a, **NO_LOGPROBS) for a in ahead] == [replace(a, **NO_LOGPROBS) for a in behind]
    assert [reported(a) for a in ahead] == [pytest.approx(reported(a), abs=1e-4) for a in behind]


NO_LOGPROBS: dict[str, Any] = {"logprobs": {}, "prompt_logprobs": []}


def reported(answer: Answer) -> list[float]:
    """All numbers of its log-probabilities in a row: the chosen token's, ranks, ids and values."""
    given = [*answer.prompt_logprobs, *chain.from_iterable(answer.logprobs.values())]
    rows = [(r.chosen, r.rank, *chain.from_iterable(r.top)) if r else (1.0,) for r in given]
    return [*chain.from_iterable(rows)]
