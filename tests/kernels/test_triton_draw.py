"""The engine's sampler draws and reports the same with the kernels as without them."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift.request import SamplingParams
from chairlift.sampler import Sampled, Sampler, SamplingRow
from chairlift_kernels.launch_table import TOP_TOKENS

VOCAB = 200


def rows(seed: int) -> list[SamplingRow]:
    """Every kind of row in one batch, seeds of both signs."""
    rng = random.Random(seed)
    kinds = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=7),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.05),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=1),
        SamplingParams(temperature=1.0, logit_bias=((3, 4.0),), repetition_penalty=1.3),
    ]
    return [
        SamplingRow(
            params,
            seed=rng.randrange(-(2**63), 2**63),
            sample_index=rng.randrange(4),
            position=rng.randrange(10_000),
            prompt_ids=[1, 2, 3],
            output_ids=[4, 4, 5],
            uid=index,
        )
        for index, params in enumerate(kinds)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens(device: torch.device, seed: int) -> None:
    batch = rows(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(len(batch), VOCAB, generator=generator)).to(device)
    expected = Sampler(VOCAB, device).sample(logits, batch)
    assert Sampler(VOCAB, device, kernels=True).sample(logits, batch) == expected


ASKING = [
    SamplingParams(temperature=1.0, repetition_penalty=1.4, logprobs=3),
    SamplingParams(temperature=0.0, presence_penalty=0.7, frequency_penalty=0.3, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=VOCAB),
    SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=-0.5, min_tokens=4),
    SamplingParams(temperature=0.0, repetition_penalty=0.8, logit_bias=((7, 3.0),), logprobs=20),
    SamplingParams(temperature=0.0),
]


def step_rows(
    prompts: list[list[int]], outputs: list[list[int]], here: list[int]
) -> list[SamplingRow]:
    return [
        SamplingRow(ASKING[i], 5, 0, len(outputs[i]), prompts[i], outputs[i], i, frozenset({9}))
        for i in here
    ]


def assert_same_reports(got: Sampled, expected: Sampled) -> None:
    assert (got.token_ids, got.invalid) == (expected.token_ids, expected.invalid)
    for mine, wanted in zip(got.logprobs, expected.logprobs, strict=True):
        if mine is None or wanted is None:
            assert mine is wanted
            continue
        assert mine.rank == wanted.rank
        assert [token for token, _ in mine.top] == [token for token, _ in wanted.top]
        scores = [mine.chosen, *(score for _, score in mine.top)]
        assert scores == pytest.approx([wanted.chosen, *(p for _, p in wanted.top)], abs=1e-5)


def test_the_same_penalties_and_reports_over_many_steps(device: torch.device) -> None:
    """Mixed batches that rows leave and join; one restarts with another answer, as after a fork."""
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(5 * i)] for i in range(len(ASKING))]
    outputs: list[list[int]] = [[] for _ in ASKING]
    plain, kernels = Sampler(VOCAB, device), Sampler(VOCAB, device, kernels=True)
    generator = torch.Generator().manual_seed(2)
    for here in ([0, 2, 5], [0, 1, 2, 3, 4, 5], [4, 3, 0, 1], [1, 4], [5, 4, 0, 3]):
        logits = (2 * torch.randn(len(here), VOCAB, generator=generator)).round().to(device)
        batch = step_rows(prompts, outputs, here)
        expected = plain.sample(logits, batch)
        assert_same_reports(kernels.sample(logits, batch), expected)
        for i, token in zip(here, expected.token_ids, strict=True):
            outputs[i].append(token)
        if here == [1, 4]:
            outputs[4] = [1, 1, 2]
            for sampler in (plain, kernels):
                sampler.release(1)
                sampler.release(0)


def test_the_same_reports_on_prompts(device: torch.device) -> None:
    """Some of a step's logits, half of them at addresses that are not a multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(3)
    odd = VOCAB + 1
    logits = (3 * torch.randn(6, odd, generator=generator)).half().to(device)
    ids = [31 * i % odd for i in range(5)]
    plain, kernels = Sampler(odd, device), Sampler(odd, device, kernels=True)
    for top_n in (0, 2, TOP_TOKENS + 1):
        got, expected = (s.prompt_logprobs(logits[1:], ids, top_n) for s in (kernels, plain))
        five = [False] * 5
        assert_same_reports(Sampled(ids, list(got), five), Sampled(ids, list(expected), five))


def test_rows_without_a_usable_logit_are_told(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0)
    batch = [SamplingRow(params, 1, 0, 5, [1], [2], uid) for uid in range(4)]
    logits = torch.zeros(4, VOCAB, device=device)
    logits[1, 17] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    sampled = Sampler(VOCAB, device, kernels=True).sample(logits, batch)
    assert sampled.invalid == [False, True, True, True]
