"""The engine's sampler draws the same tokens with the kernels as without them."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow

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


def test_rows_without_a_usable_logit_are_told(device: torch.device) -> None:
    params = SamplingParams(temperature=1.0)
    batch = [SamplingRow(params, 1, 0, 5, [1], [2], uid) for uid in range(4)]
    logits = torch.zeros(4, VOCAB, device=device)
    logits[1, 17] = torch.nan
    logits[2] = -torch.inf
    logits[3, 4] = torch.inf
    sampled = Sampler(VOCAB, device, kernels=True).sample(logits, batch)
    assert sampled.invalid == [False, True, True, True]
