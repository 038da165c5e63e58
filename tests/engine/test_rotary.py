"""Rotary embeddings that transformers would change with the longest prompt of a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from chairlift import loader
from chairlift.config import EngineConfig
from chairlift.loader import LoadedModel
from tests.engine.harness import GREEDY, Harness, Oracle
from tests.engine.tiny_models import build

TRAINED = 64
SHORT, LONG = list(range(3, 40)), [5 + i % 80 for i in range(90)]
ANSWER = replace(GREEDY, max_tokens=12)


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on 64 tokens, stretched to 512, as Phi-3's are to 128k."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]}
    return build(
        tmp_path_factory.mktemp("longrope"),
        "phi3",
        original_max_position_embeddings=TRAINED,
        rope_scaling={"type": "longrope", **factors},
    )


def load(folder: Path, **settings: Any) -> LoadedModel:
    return loader.load(EngineConfig(model=str(folder), **settings))


def oracle(folder: Path) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())


def test_short_context_uses_the_short_factors(longrope: Path) -> None:
    loaded = load(longrope, max_model_len=TRAINED)
    answer = Harness(loaded, num_kv_blocks=40).generate([SHORT], ANSWER)[0]
    oracle(longrope).check(SHORT, answer, ANSWER.max_tokens)


def test_long_context_uses_the_long_factors(longrope: Path) -> None:
    answer = Harness(load(longrope), num_kv_blocks=40).generate([LONG], ANSWER)[0]
    oracle(longrope).check(LONG, answer, ANSWER.max_tokens)


@pytest.mark.parametrize("limit", [TRAINED, 512])
def test_a_long_prompt_does_not_change_a_short_ones_answer(longrope: Path, limit: int) -> None:
    loaded = load(longrope, max_model_len=limit)
    beside = LONG if limit > len(LONG) + ANSWER.max_tokens else SHORT[:20]
    alone = Harness(loaded, num_kv_blocks=40).generate([SHORT], ANSWER)[0]
    together = Harness(loaded, num_kv_blocks=40)
    uid = together.submit(SHORT, ANSWER)
    for _ in range(3):
        together.step()
    together.submit(beside, ANSWER)
    together.run()
    assert together.answers[uid].tokens[0] == alone


def test_dynamic_scaling_below_the_limit(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = build(tmp_path, "llama", rope_scaling=scaling)
    loaded = load(folder)
    reference = oracle(folder)
    for prompt, answer in zip(
        (SHORT, LONG),
        Harness(loaded, num_kv_blocks=40).generate([SHORT, LONG], ANSWER),
        strict=True,
    ):
        reference.check(prompt, answer, ANSWER.max_tokens)
