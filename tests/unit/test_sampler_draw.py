"""Which tokens can be drawn, how often, and that the batch has no say in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.gumbel import GumbelNoise, Place
from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow
from chairlift_kernels import noise
from tests.unit.sampling_harness import CPU, expected_kept, kept, row

filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.8]),
    top_k=st.sampled_from([0, -1, 2, 5, 40, 127, 128, 129, 400, 100_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.1, 1e-4]),
    min_p=st.sampled_from([0.0, 1e-4, 0.02, 0.3, 1.0]),
)


def random_logits(vocab_size: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@settings(max_examples=150, deadline=None)
@given(
    params=filters,
    vocab_size=st.sampled_from([3, 50, 257, 1000, 5000]),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
    bfloat16=st.booleans(),
)
def test_exactly_the_tokens_that_sorting_keeps(
    params: SamplingParams, vocab_size: int, seed: int, spread: float, bfloat16: bool
) -> None:
    logits = random_logits(vocab_size, seed, spread)
    if bfloat16:
        logits = logits.bfloat16()
    expected = expected_kept(logits, params)
    last = int(expected.kept.sum())
    ranked = logits.float().argsort(descending=True).tolist()
    asked = ranked[max(0, last - 12) : last + 12] + ranked[:: max(1, vocab_size // 16)]
    for token, is_kept in zip(asked, kept(logits, params, asked), strict=True):
        if expected.certain[token]:
            assert is_kept == expected.kept[token], f"token {token}, rank {ranked.index(token)}"


def test_all_equals_of_the_last_kept_token_stay() -> None:
    logits = torch.zeros(5000)
    logits[[10, 4000]] = 1.0
    everything = list(range(0, 5000, 100)) + [10, 4000]
    assert all(kept(logits, SamplingParams(top_k=3), everything))
    assert all(kept(logits, SamplingParams(top_p=0.5), everything))
    assert kept(logits, SamplingParams(top_k=2), everything) == [
        t in (10, 4000) for t in everything
    ]


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.0), SamplingParams(min_p=1.0)])
def test_the_best_token_always_stays(params: SamplingParams) -> None:
    logits = random_logits(500, 0)
    best = int(logits.argmax())
    assert kept(logits, params, [best, (best + 1) % 500]) == [True, False]


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chi-square test; cells that expect fewer than 5 are put together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum().view(1)))
    expected = torch.cat((expected[~rare], expected[rare].sum().view(1) + 1e-9))
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc((len(expected) - 1) / 2 * torch.ones(()), statistic / 2))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=0.6, top_k=20),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=2.0, top_p=0.97),
        SamplingParams(min_p=0.05, top_k=50, top_p=0.8),
    ],
)
@pytest.mark.parametrize("vary", ["position", "seed", "sample_index"])
def test_draws_follow_the_distribution(params: SamplingParams, vary: str) -> None:
    vocab_size, draws, batch = 400, 12_000, 2000
    logits = random_logits(vocab_size, 7, 1.5)
    sampler = Sampler(vocab_size, CPU)
    counts = Counter[int]()
    for start in range(0, draws, batch):
        rows = [row(params, **{vary: i}) for i in range(start, start + batch)]
        counts.update(sampler.sample(logits.expand(batch, -1), rows).token_ids)
    keep = expected_kept(logits, params).kept
    probabilities = torch.where(keep, logits.double() / params.temperature, -torch.inf).softmax(0)
    observed = torch.tensor([counts[token] for token in range(vocab_size)], dtype=torch.float64)
    assert not observed[~keep].any()
    assert p_value(observed, probabilities) > 1e-3


mixed = st.lists(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-5, 0.7, 1.0, 1.5]),
        top_k=st.sampled_from([0, 1, 20, 300]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.05]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([(), ((3, 2.5), (40, -100.0))]),
        min_tokens=st.sampled_from([0, 5]),
        logprobs=st.sampled_from([None, 2]),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(params=mixed, seed=st.integers(0, 2**64 - 1), order=st.randoms(use_true_random=False))
def test_a_row_gets_the_same_token_in_every_batch(
    params: list[SamplingParams], seed: int, order: object
) -> None:
    vocab_size = 2500
    logits = torch.stack([random_logits(vocab_size, i, 1.0 + i) for i in range(len(params))])
    rows = [
        SamplingRow(p, seed ^ i, i % 3, 17 + i, [i, 3, 5], [3, 9, i], i, frozenset({2}), ((7,),))
        for i, p in enumerate(params)
    ]
    alone = [
        Sampler(vocab_size, CPU).sample(logits[i : i + 1], [rows[i]]) for i in range(len(rows))
    ]
    sampler = Sampler(vocab_size, CPU)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for chosen in (list(range(len(rows))), shuffled, shuffled[: len(rows) // 2 + 1]):
        together = sampler.sample(logits[chosen], [rows[i] for i in chosen])
        assert together.token_ids == [alone[i].token_ids[0] for i in chosen]
        assert together.logprobs == [alone[i].logprobs[0] for i in chosen]


def test_rows_of_one_call_do_not_depend_on_groups_or_threads() -> None:
    """More rows than one group of the wide path, with nuclei that reach beyond the candidates."""
    vocab_size, count = 30_000, 21
    params = SamplingParams(temperature=1.5, top_p=0.9)
    logits = torch.stack([random_logits(vocab_size, i, 0.5) for i in range(count)])
    rows = [row(params, i, position=i) for i in range(count)]
    together = Sampler(vocab_size, CPU).sample(logits, rows).token_ids
    for i in (0, 7, 20):
        assert Sampler(vocab_size, CPU).sample(logits[i : i + 1], [rows[i]]).token_ids == [
            together[i]
        ]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.stack([random_logits(1000, i) for i in range(3)])
    before = logits.clone()
    params = SamplingParams(top_p=0.9, repetition_penalty=2.0, logit_bias=((1, 5.0),), logprobs=3)
    rows = [row(replace(params, temperature=t), i, prompt_ids=[1]) for i, t in enumerate((0, 1, 2))]
    Sampler(1000, CPU).sample(logits, rows)
    assert torch.equal(logits, before)


def test_noise_equals_that_of_the_kernels() -> None:
    seeds = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
    places = [Place(seed, i, 1000 * i) for i, seed in enumerate(seeds)]
    ours = GumbelNoise(300, CPU)
    keys = ours.keys(places)
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds])
    index = torch.arange(len(seeds))
    theirs = noise.gumbel_noise(signed, index, 1000 * index, 300)
    assert torch.equal(keys, noise.row_keys(signed, index, 1000 * index))
    assert torch.equal(ours.everywhere(keys), theirs)
    ids = torch.tensor([[5, 299, 0]]).expand(len(seeds), -1)
    assert torch.equal(ours.at(keys, ids), theirs.gather(1, ids))
