"""Sampling, penalties and log-probabilities against torch with sorts; noise alike on both sides."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from chairlift_kernels import reference_sampling as reference
from chairlift_kernels.logprobs import logprobs
from chairlift_kernels.noise import (
    START_0,
    START_1,
    gumbel_noise,
    gumbel_noise_at,
    row_keys,
    token_hash,
    uniform_from,
)
from chairlift_kernels.noise_device import row_key, uniform
from chairlift_kernels.penalties import apply_penalties
from chairlift_kernels.sampling import keep_threshold, sample

PINNED_HASHES = [-946721448, -777126658, -2083396767, -419120282]
PINNED_KEYS = [[-1316587022, -1614595435]]
PINNED_NOISE = [0.4455069, 0.2716205, 3.664057, -0.2250746]
SEEDS = [0, 1, -1, 2**62 + 5, 12_345_678_901, -(2**63), 2**63 - 1]


class Settings(NamedTuple):
    """One value a row: fp32, int32, fp32, fp32."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor


def settings(rows: list[tuple[float, int, float, float]], device: torch.device) -> Settings:
    temperature, top_k, top_p, min_p = (
        torch.tensor(column, device=device) for column in zip(*rows, strict=True)
    )
    return Settings(temperature.float(), top_k.int(), top_p.float(), min_p.float())


def places(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row = torch.arange(rows, device=device)
    return row * 7 - 3, row % 3, row * 11


def random_logits(rows: int, size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return (3 * torch.randn(rows, size, generator=generator)).to(device)


@triton.jit
def _uniform_kernel(seeds, sample_index, positions, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tokens = tl.arange(0, BLOCK)
    place = tl.load(seeds + row), tl.load(sample_index + row), tl.load(positions + row)
    key_0 = row_key(place[0], place[1], place[2], 0x9E3779B9)
    key_1 = row_key(place[0], place[1], place[2], 0x3C6EF372)
    tl.store(out + row * size + tokens, uniform(key_0, key_1, tokens), mask=tokens < size)


def test_uniforms_have_the_same_bits_in_torch_and_in_kernels(device: torch.device) -> None:
    assert (START_0, START_1) == (0x9E3779B9, 0x3C6EF372)
    seeds = torch.tensor(SEEDS, device=device)
    rows = len(SEEDS)
    index = torch.arange(rows, device=device)
    out = torch.empty(rows, 1000, device=device)
    _uniform_kernel[(rows,)](seeds, index, index * 1000, out, 1000, BLOCK=1024)
    hashes = token_hash(torch.arange(1000, device=device))
    assert torch.equal(out, uniform_from(row_keys(seeds, index, index * 1000), hashes))


def test_noise_is_pinned() -> None:
    """A change of these values would change the answer to every seeded request."""
    noise = gumbel_noise(torch.tensor([42]), torch.tensor([1]), torch.tensor([7]), 4)
    hashes = token_hash(torch.arange(4)).tolist()
    keys = row_keys(torch.tensor([42]), torch.tensor([1]), torch.tensor([7])).tolist()
    assert hashes == PINNED_HASHES
    assert keys == PINNED_KEYS
    assert noise[0].tolist() == pytest.approx(PINNED_NOISE, abs=2e-6)


def test_noise_of_chosen_tokens_is_that_of_the_whole_vocabulary() -> None:
    seeds, index, position = places(5, torch.device("cpu"))
    ids = torch.tensor([[3, 99, 0]]).expand(5, 3)
    whole = gumbel_noise(seeds, index, position, 100)
    assert torch.equal(gumbel_noise_at(seeds, index, position, ids), whole.gather(1, ids))


@pytest.mark.parametrize("vary", ["seed", "seed's high half", "sample index", "position"])
def test_uniforms_look_independent(vary: str) -> None:
    """Chi-squared of the values, and correlations between rows, tokens and neighbours."""
    rows, size = 2048, 1000
    step, zero = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    place = {
        "seed": (step, zero, zero),
        "seed's high half": (step << 32, zero, zero),
        "sample index": (zero, step, zero),
        "position": (zero, zero, step),
    }[vary]
    u = uniform_from(row_keys(*place), token_hash(torch.arange(size))).double()
    assert u.min() > 0 and u.max() < 1
    cells = torch.histc(u, 256, 0, 1)
    share = u.numel() / 256
    assert abs(((cells - share) ** 2 / share).sum() - 255) < 5 * (2 * 255) ** 0.5
    z = (u - 0.5) * 12**0.5
    between_tokens = (z.T @ z / rows**0.5).fill_diagonal_(0)
    between_rows = (z @ z.T / size**0.5).fill_diagonal_(0)
    for normal in (between_tokens, between_rows, z.mean(0) * rows**0.5, z.mean(1) * size**0.5):
        assert normal.abs().max() < 6.5
        assert abs(normal.pow(2).mean() - 1) < 0.2


ROWS = [
    (1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (0.0, 5, 0.5, 0.0), (1.0, 0, 0.95, 0.1),
    (1.0, 10, 0.9, 0.0), (2.0, 1000, 0.99, 0.0), (1.0, 0, 0.5, 0.05), (1.0, 1, 1.0, 0.0),
    (0.3, 0, 0.999, 0.0), (1.0, 3, 0.1, 0.0), (1.0, 0, 1.0, 0.2), (1.0, 4999, 0.3, 0.0),
]  # fmt: skip


@pytest.mark.parametrize("size", [64, 5000])
def test_thresholds_keep_what_sorting_keeps(size: int, device: torch.device) -> None:
    logits = random_logits(len(ROWS), size, device)
    logits[3, 20:] = float("-inf")
    logits[4] = logits[4].round()  # many ties
    chosen = settings(ROWS, device)
    kept = logits >= keep_threshold(logits, *chosen)[:, None]
    assert torch.equal(kept, reference.keep_mask(logits, *chosen))


def test_samples_are_those_of_the_reference(device: torch.device) -> None:
    logits = random_logits(len(ROWS), 9000, device)
    chosen, where = settings(ROWS, device), places(len(ROWS), device)
    drawn = sample(logits, *chosen, *where)
    assert torch.equal(drawn.token_ids, reference.sample(logits, *chosen, *where))
    assert drawn.finite.all()


def test_a_row_draws_the_same_token_in_any_batch(device: torch.device) -> None:
    logits = random_logits(len(ROWS), 700, device)
    chosen, where = settings(ROWS, device), places(len(ROWS), device)
    together = sample(logits, *chosen, *where).token_ids
    for row in (0, 1, 11):
        mine = slice(row, row + 1)
        alone = sample(logits[mine], *(x[mine] for x in (*chosen, *where)))
        assert alone.token_ids[0] == together[row]


def test_draws_follow_the_distribution() -> None:
    """Chi-squared over the positions of one request, top-k cutting the last two tokens.

    On the reference, whose uniforms have the kernels' bits and whose tokens are theirs.
    """
    draws, cpu = 20_000, torch.device("cpu")
    logits = torch.log(torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01]))
    position = torch.arange(draws)
    chosen = settings([(1.0, 4, 1.0, 0.0)] * draws, cpu)
    seeds = torch.full_like(position, 5)
    drawn = reference.sample(logits.expand(draws, 6), *chosen, seeds, seeds * 0, position)
    expected = torch.tensor([0.4, 0.25, 0.2, 0.1]) / 0.95 * draws
    counts = drawn.bincount(minlength=6)
    assert (counts[4:] == 0).all()
    assert ((counts[:4] - expected) ** 2 / expected).sum() < 16.3  # p = 0.001, 3 degrees of freedom


def test_unusable_logits_are_reported_and_hurt_no_other_row(device: torch.device) -> None:
    """A6: NaN must not come out as token 0."""
    logits = random_logits(5, 5000, device)
    good = sample(logits, *settings([(1.0, 0, 0.9, 0.0)] * 5, device), *places(5, device))
    logits[1, 4321] = float("nan")
    logits[2] = float("-inf")
    logits[3, 7] = float("inf")
    drawn = sample(logits, *settings([(1.0, 0, 0.9, 0.0)] * 5, device), *places(5, device))
    assert drawn.finite.tolist() == [True, False, False, False, True]
    assert drawn.token_ids[0] == good.token_ids[0] and drawn.token_ids[4] == good.token_ids[4]


def test_penalties(device: torch.device) -> None:
    rows, size, slots = 4, 5000, 7
    generator = torch.Generator().manual_seed(3)
    logits = random_logits(rows, size, device)
    prompt = torch.randint(0, 2, (slots, size), generator=generator, dtype=torch.int32).to(device)
    output = torch.randint(0, 3, (slots, size), generator=generator, dtype=torch.int16).to(device)
    where = torch.tensor([6, 2, 0, 3], device=device)
    values = [torch.tensor(x, device=device) for x in (
        [1.3, 0.7, 1.0, 1.0], [0.0, 0.5, 0.0, -0.4], [0.2, 0.0, 0.0, 0.1],
    )]  # fmt: skip
    expected = reference.apply_penalties(logits.double(), prompt[where], output[where], *values)
    untouched = logits[2].clone()
    apply_penalties(logits, prompt, output, where, *values)
    assert torch.equal(logits[2], untouched)
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("size", "count"), [(40, 0), (40, 40), (5000, 1), (9000, 7)])
def test_logprobs(size: int, count: int, device: torch.device) -> None:
    rows = 3
    logits = random_logits(rows, size, device)
    logits[1, 7:20] = float("-inf")
    logits[2, 5] = logits[2].max()  # a tie: the lower id first
    ids = torch.tensor([0, 3, size - 1], device=device)
    out = logprobs(logits, ids, count)
    exact = logits.double().log_softmax(1)
    mine = exact.gather(1, ids[:, None])
    assert (out.chosen - mine[:, 0]).abs().max() < 1e-5
    assert torch.equal(out.rank.long(), (logits > logits.gather(1, ids[:, None])).sum(1) + 1)
    order = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    finite = exact.gather(1, order) > float("-inf")
    assert torch.equal(out.top_ids[finite], order[finite])
    assert torch.equal(out.top > float("-inf"), finite)
    assert torch.allclose(out.top[finite].double(), exact.gather(1, order)[finite], atol=1e-5)
