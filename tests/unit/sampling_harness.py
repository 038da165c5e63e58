"""Noise that asks a sampler which tokens it would keep, and what it should keep, by sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from chairlift.gumbel import Place
from chairlift.request import SamplingParams
from chairlift.sampler import Sampler, SamplingRow

CPU = torch.device("cpu")
VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)


def row(params: SamplingParams, uid: int = 0, **fields: object) -> SamplingRow:
    """A row with the fields that a test does not care about filled in."""
    defaults: dict[str, object] = {
        "seed": 1,
        "sample_index": 0,
        "position": 0,
        "prompt_ids": [],
        "output_ids": [],
    }
    return SamplingRow(params=params, uid=uid, **{**defaults, **fields})  # type: ignore[arg-type]


def logits_of(count: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def generate(
    sampler: Sampler,
    params: SamplingParams,
    length: int,
    *,
    logits: torch.Tensor | None = None,
    neighbours: int = 0,
    first: bool = False,
    **fields: object,
) -> list[int]:
    """Draw ``length`` tokens of one request; every position has its own logits, if none are given.

    ``neighbours`` penalised requests with prompts of other lengths share each batch.
    """
    output: list[int] = []
    loud = SamplingParams(temperature=0.9, repetition_penalty=2.0, frequency_penalty=1.05)
    beside = [row(loud, 100 + i, prompt_ids=[i] * (5 + 40 * i)) for i in range(neighbours)]
    for position in range(length):
        own = logits if logits is not None else logits_of(1, position)[0]
        mine = row(params, 1, position=position, output_ids=output, **fields)
        rows = [mine, *beside] if first else [*beside, mine]
        batch = torch.stack([own if r is mine else logits_of(1, 50 + r.uid)[0] for r in rows])
        output.append(sampler.sample(batch, rows).token_ids[rows.index(mine)])
    return output


class Favour:
    """Noise so large at the token ``sample_index`` of each row that it wins if it was kept."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def keys(self, places: Sequence[Place]) -> torch.Tensor:
        return torch.tensor([[place.sample_index] for place in places])

    def at(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.where(token_ids == keys, 1e9, 0.0)

    def everywhere(self, keys: torch.Tensor) -> torch.Tensor:
        return self.at(keys, torch.arange(self._vocab_size).unsqueeze(0))


def kept(
    logits: torch.Tensor, params: SamplingParams, asked: Sequence[int], **fields: object
) -> list[bool]:
    """For each asked token whether a row with these logits [V] could draw it."""
    sampler = Sampler(len(logits), CPU, Favour(len(logits)))
    rows = [row(params, uid, sample_index=token, **fields) for uid, token in enumerate(asked)]
    drawn = sampler.sample(logits.expand(len(asked), -1), rows).token_ids
    return [token == wanted for token, wanted in zip(drawn, asked, strict=True)]


class Expected(NamedTuple):
    """bool [V] each; where not ``certain`` a token is so near an edge that rounding decides."""

    kept: torch.Tensor
    certain: torch.Tensor


def expected_kept(logits: torch.Tensor, params: SamplingParams) -> Expected:
    """What min_p, top_k and top_p keep, in float64 by sorting; equals of the last kept stay."""
    y = (logits.double() - logits.double().max()) / params.temperature
    margin = 1e-5
    keep = y.exp() >= params.min_p
    certain = (y.exp() - params.min_p).abs() > margin * params.min_p
    if 0 < params.top_k < len(y):
        keep &= y >= y.sort(descending=True).values[params.top_k - 1]
    if params.top_p < 1.0:
        mass = torch.where(keep, y.exp(), 0.0)
        order = y.sort(descending=True)
        until = mass[order.indices].cumsum(0)
        first = torch.searchsorted(-order.values, -y)
        above = torch.where(first > 0, until[(first - 1).clamp(min=0)], 0.0) / mass.sum()
        keep &= (above < params.top_p) | (y == 0.0)
        certain &= (above - params.top_p).abs() > margin
    return Expected(keep, certain)
