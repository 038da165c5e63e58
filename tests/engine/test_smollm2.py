"""SmolLM2 in float32 answers as transformers' ``generate`` does, token for token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from chairlift.loader import LoadedModel
from chairlift.request import SamplingParams
from tests.engine.harness import GREEDY, Harness, Oracle

NUM_PROMPTS = 24
ANSWER = replace(GREEDY, max_tokens=16)


@pytest.fixture(scope="module")
def prompts(english: list[int]) -> list[list[int]]:
    """24 prompts of 5 to 1,500 tokens, some of an exact multiple of the block size, two equal."""
    rng = random.Random(7)
    lengths = [5, 16, 32, 48, 64, 127, 128, 129, 400, 1500]
    lengths += [rng.randint(5, 200) for _ in range(NUM_PROMPTS - 1 - len(lengths))]
    made = []
    for length in lengths:
        start = rng.randrange(len(english) - length)
        made.append(english[start : start + length])
    return [*made, made[4]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]], smollm2_oracle: Oracle) -> list[list[int]]:
    return [smollm2_oracle.generate(prompt, ANSWER.max_tokens) for prompt in prompts]


def check(
    oracle: Oracle, prompts: list[list[int]], answers: list[list[int]], expected: list[list[int]]
) -> None:
    for prompt, answer, reference in zip(prompts, answers, expected, strict=True):
        oracle.check_against(prompt, answer, reference)


def test_all_at_once(smollm2: LoadedModel, smollm2_oracle: Oracle, prompts, expected) -> None:
    harness = Harness(smollm2, num_kv_blocks=1000, max_num_batched_tokens=512)
    check(smollm2_oracle, prompts, harness.generate(prompts, ANSWER), expected)
    assert max(stats.num_running for stats in harness.stats) == NUM_PROMPTS


def test_staggered(smollm2: LoadedModel, smollm2_oracle: Oracle, prompts, expected) -> None:
    """A new request boards every other step, while others decode."""
    harness = Harness(smollm2, num_kv_blocks=1000, max_num_batched_tokens=256)
    uids = []
    for prompt in prompts:
        uids.append(harness.submit(prompt, ANSWER))
        harness.step()
        harness.step()
    harness.run()
    check(smollm2_oracle, prompts, [harness.answers[u].tokens[0] for u in uids], expected)
    assert any(s.num_decodes and s.num_prefill_tokens for s in harness.stats), "nothing was mixed"


def test_pool_so_small_that_it_must_preempt(
    smollm2: LoadedModel, smollm2_oracle: Oracle, prompts, expected
) -> None:
    short = [(p, e) for p, e in zip(prompts, expected, strict=True) if len(p) <= 200]
    harness = Harness(
        smollm2, num_kv_blocks=30, max_num_batched_tokens=128, kv_reserve_fraction=0.0
    )
    answers = harness.generate([p for p, _ in short], ANSWER)
    check(smollm2_oracle, [p for p, _ in short], answers, [e for _, e in short])
    assert harness.scheduler.num_preemptions > 0


@pytest.mark.parametrize("chunk", [16, 48])
def test_A1_any_chunk_size(
    smollm2: LoadedModel, smollm2_oracle: Oracle, english: list[int], chunk: int
) -> None:
    lengths = [chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 5]
    prompts = [english[100 * i : 100 * i + n] for i, n in enumerate(lengths)]
    harness = Harness(
        smollm2, num_kv_blocks=300, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 8)
    )
    params = replace(GREEDY, max_tokens=6)
    for prompt, answer in zip(prompts, harness.generate(prompts, params), strict=True):
        smollm2_oracle.check(prompt, answer, params.max_tokens)


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
def test_every_mode_and_a_warm_cache(
    smollm2: LoadedModel, smollm2_oracle: Oracle, prompts, expected, batching: str
) -> None:
    """Cold, warm, and after eviction; in each batching mode."""
    pairs = [(p, e) for p, e in zip(prompts, expected, strict=True) if len(p) <= 129][:8]
    some, wanted = [p for p, _ in pairs], [e for _, e in pairs]
    harness = Harness(
        smollm2, num_kv_blocks=70, batching=batching, batch_size=3, batch_window_ms=20
    )
    for round_ in range(3):
        check(smollm2_oracle, some, harness.generate(some, ANSWER, batch_id=round_), wanted)


def test_sampled_text_survives_preemption_K7(smollm2: LoadedModel, english: list[int]) -> None:
    prompts = [english[50 * i : 50 * i + 40] for i in range(6)]
    params = [
        SamplingParams(temperature=0.9, max_tokens=30, seed=i, ignore_eos=True) for i in range(6)
    ]
    texts = []
    for blocks, reserve in ((400, 1.0), (16, 0.0)):
        harness = Harness(smollm2, num_kv_blocks=blocks, kv_reserve_fraction=reserve)
        uids = [harness.submit(p, s) for p, s in zip(prompts, params, strict=True)]
        harness.run()
        texts.append([harness.answers[uid].tokens[0] for uid in uids])
    assert harness.scheduler.num_preemptions > 0
    assert texts[0] == texts[1]


def test_forks_share_and_differ_C6(smollm2: LoadedModel, english: list[int]) -> None:
    """n = 4: one prefill, four answers, the same four again; alone each sample is the same."""
    prompt = english[:37]
    params = SamplingParams(temperature=1.0, max_tokens=12, seed=1, n=4, ignore_eos=True)
    runs = []
    for _ in range(2):
        harness = Harness(smollm2, num_kv_blocks=100)
        uid = harness.submit(prompt, params)
        harness.step()
        assert harness.scheduler.kv.num_used == 3, "nothing is copied before a fork writes"
        harness.step()
        assert harness.scheduler.kv.num_used == 2 + 4, "forks hold more than their own tails"
        harness.run()
        answer = harness.answers[uid]
        assert sorted(answer.finish) == [0, 1, 2, 3]
        runs.append([answer.tokens[i] for i in range(4)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4
    alone = Harness(smollm2, num_kv_blocks=100)
    assert alone.generate([prompt], replace(params, n=1))[0] == runs[0][0]


def test_prompt_logprobs_are_whole_with_a_warm_cache_K11(
    smollm2: LoadedModel, english: list[int]
) -> None:
    prompt = english[:40]
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=2, logprobs=2)
    harness = Harness(smollm2, num_kv_blocks=100, max_num_batched_tokens=16, max_num_seqs=4)
    scores = []
    harness.generate([prompt[:32] + english[90:100]])
    for _ in range(2):
        uid = harness.submit(prompt, params)
        harness.run()
        scores.append([entry.chosen for entry in harness.answers[uid].prompt_logprobs])
    assert len(scores[0]) == len(prompt) - 1
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert all(score <= 0 for score in scores[0])
