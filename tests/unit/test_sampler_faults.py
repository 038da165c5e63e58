"""The faults of other servers that the sampler must not have; ids as in the list of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chairlift.request import SamplingParams
from chairlift.sampler import Sampler
from tests.unit.sampling_harness import CPU, GREEDY, VOCAB, generate, logits_of, row


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-38, 0.0])
@pytest.mark.parametrize("top_p", [0.95, 1e-4, 1.0])
def test_p2_a_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    logits = (logits_of(8) * 1e4).bfloat16()
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=50)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, i) for i in range(8)])
    assert sampled.token_ids == logits.float().argmax(1).tolist()
    assert sampled.invalid == [False] * 8


def test_p2_a_temperature_just_above_does_not_overflow() -> None:
    logits = logits_of(8)
    params = SamplingParams(temperature=1.1e-4, top_p=0.95)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, i) for i in range(8)])
    assert sampled.token_ids == logits.argmax(1).tolist()


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, 10 * VOCAB])
def test_p4_top_k_that_means_off(top_k: int) -> None:
    logits = logits_of(40)
    off = [row(SamplingParams(), i, position=i) for i in range(40)]
    given = [r._replace(params=SamplingParams(top_k=top_k)) for r in off]
    expected = Sampler(VOCAB, CPU).sample(logits, off).token_ids
    assert Sampler(VOCAB, CPU).sample(logits, given).token_ids == expected


def test_p4_top_k_of_one_is_greedy_even_among_equals() -> None:
    logits = torch.zeros(20, VOCAB)
    logits[:, [5, 9]] = 1.0
    rows = [row(SamplingParams(top_k=1), i, position=i) for i in range(20)]
    assert Sampler(VOCAB, CPU).sample(logits, rows).token_ids == [5] * 20


def test_p5_every_64_bit_seed_is_its_own_and_repeats() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
    texts = [generate(Sampler(VOCAB, CPU), SamplingParams(), 12, seed=seed) for seed in seeds]
    assert texts == [
        generate(Sampler(VOCAB, CPU), SamplingParams(), 12, seed=seed) for seed in seeds
    ]
    assert len({tuple(text) for text in texts}) == len(seeds)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_p9_forced_end_comes_after_exactly_min_tokens(min_tokens: int) -> None:
    """Neither of two end tokens nor a stop token comes early, not even by a bias."""
    params = replace(
        GREEDY,
        min_tokens=min_tokens,
        stop_token_ids=(9,),
        logit_bias=((2, 100.0), (3, 60.0), (9, 60.0)),
    )
    ends = frozenset({2, 3})
    output = generate(Sampler(VOCAB, CPU), params, min_tokens + 1, eos_ids=ends)
    assert not {2, 3, 9} & set(output[:min_tokens])
    assert output[min_tokens] == 2


def test_p9_ignored_ends_are_ordinary_tokens() -> None:
    params = replace(GREEDY, min_tokens=5, ignore_eos=True, logit_bias=((2, 100.0),))
    assert generate(Sampler(VOCAB, CPU), params, 3, eos_ids=frozenset({2})) == [2, 2, 2]


def test_p12_greedy_stays_greedy_among_sampled_rows() -> None:
    logits = logits_of(3)
    zero = SamplingParams(temperature=0.0, seed=5, top_p=0.5, top_k=3)
    loud = SamplingParams(temperature=2.0)
    for attempt in range(10):
        rows = [row(loud, 0, seed=attempt), row(zero, 1, seed=attempt), row(loud, 2)]
        assert Sampler(VOCAB, CPU).sample(logits, rows).token_ids[1] == int(logits[1].argmax())


@pytest.mark.parametrize("first", [True, False])
def test_c1_penalised_neighbours_change_nobody_else(first: bool) -> None:
    penalised = replace(GREEDY, repetition_penalty=2.0)
    plain = SamplingParams(temperature=1.3, seed=4, top_k=20)
    for params in (GREEDY, penalised, plain):
        alone = generate(Sampler(VOCAB, CPU), params, 10, prompt_ids=[4, 5])
        beside = generate(
            Sampler(VOCAB, CPU), params, 10, prompt_ids=[4, 5], neighbours=3, first=first
        )
        assert alone == beside


def test_c2_only_own_tokens_are_counted() -> None:
    """A short prompt beside long ones: no padding gets into the counts."""
    logits = torch.zeros(VOCAB)
    logits[:4] = torch.tensor([3.0, 2.5, 2.2, 2.0])
    params = replace(GREEDY, frequency_penalty=1.05)
    alone = generate(Sampler(VOCAB, CPU), params, 8, logits=logits, prompt_ids=[1])
    beside = generate(Sampler(VOCAB, CPU), params, 8, logits=logits, prompt_ids=[1], neighbours=4)
    assert alone == beside
    assert alone[:4] == [0, 1, 2, 3]


def test_c5_seeded_draws_go_on_from_token_to_token() -> None:
    """60 tokens from flat logits repeat as often as chance has it, and seeds differ."""
    sampler, flat = Sampler(VOCAB, CPU), torch.zeros(30, VOCAB)
    params = SamplingParams(temperature=1.5)
    steps = [
        sampler.sample(flat, [row(params, s, seed=s, position=n) for s in range(30)]).token_ids
        for n in range(60)
    ]
    texts = list(zip(*steps, strict=True))
    ratio = sum(len(set(text)) for text in texts) / (30 * 60)
    expected = VOCAB * (1 - (1 - 1 / VOCAB) ** 60) / 60
    assert abs(ratio - expected) < 0.1 * expected
    assert len(set(texts)) == 30


def test_c6_samples_of_one_request_differ_and_repeat() -> None:
    def samples() -> list[list[int]]:
        return [
            generate(Sampler(VOCAB, CPU), SamplingParams(n=4), 12, sample_index=i) for i in range(4)
        ]

    first = samples()
    assert len({tuple(text) for text in first}) == 4
    assert samples() == first


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=30),
        SamplingParams(top_k=300, top_p=0.5, min_p=0.01),
        replace(GREEDY, repetition_penalty=1.2, logit_bias=((3, 1.0),), logprobs=2),
    ],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [slice(None), slice(3, 4), slice(700, 701)])
def test_a6_a_poisoned_row_is_reported_and_hurts_nobody(
    params: SamplingParams, poison: float, where: slice
) -> None:
    logits = logits_of(5, 2)
    rows = [row(params, i, position=i, prompt_ids=[3]) for i in range(5)]
    clean = Sampler(VOCAB, CPU).sample(logits, rows)
    logits[2, where] = poison
    sampled = Sampler(VOCAB, CPU).sample(logits, rows)
    harmless = poison == -float("inf") and where != slice(None)
    assert sampled.invalid == [False, False, not harmless, False, False]
    for i in (0, 1, 3, 4):
        assert sampled.token_ids[i] == clean.token_ids[i]
        assert sampled.logprobs[i] == clean.logprobs[i]
    if not harmless:
        assert sampled.logprobs[2] is None


def test_a6_a_ban_does_not_hide_the_poison() -> None:
    logits = logits_of(1)
    logits[0, 2] = float("nan")
    params = replace(GREEDY, min_tokens=5)
    sampled = Sampler(VOCAB, CPU).sample(logits, [row(params, eos_ids=frozenset({2}))])
    assert sampled.invalid == [True]
