"""Drawing tokens: temperature, min-p, top-k and top-p as one threshold, then Gumbel-max.

With y = (x - max x) / temperature a row keeps, in this order,
    min_p   y >= log(min_p)
    top_k   y >= the k-th largest
    top_p   mass strictly above y < top_p * mass of what is left, the mass of y being exp(y)
so tokens equal to the last one kept are kept as well (bf16 logits have many equals), the best token
always stays, and the result is argmax(y + noise) over what is kept. The noise belongs to the token
(see chairlift_kernels.noise): neither the batch nor the way the kept set was found can change the
outcome, up to the rounding of the top_p sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .gumbel import Noise
from .request import SamplingParams
from .rowwise import (
    best_token,
    exp_of,
    exp_sums,
    group_size,
    row_sums,
    top_tokens,
    true_rows,
)

# Holds the usual top_k and most nuclei. Per row of 49,152 on one core 64 candidates cost 36 us, 128
# 52 us, 256 82 us; a row they do not suffice for costs 250 us more.
NUM_CANDIDATES = 128


class Settings(NamedTuple):
    """Columns [R, 1]; ``top_k`` is W where off, ``top_p`` is inf where off."""

    inverse_temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor

    @staticmethod
    def of(params: Sequence[SamplingParams], width: int, device: torch.device) -> Settings:
        numbers = [
            (
                1.0 / p.temperature,
                math.log(min(p.min_p, 1.0)) if p.min_p > 0.0 else -math.inf,
                p.top_k if 0 < p.top_k < width else width,
                p.top_p if p.top_p < 1.0 else math.inf,
            )
            for p in params
        ]
        columns = torch.tensor(numbers, dtype=torch.float32, device=device)
        scale, log_min_p, top_k, top_p = columns.unsqueeze(2).unbind(1)
        return Settings(scale, log_min_p, top_k.long(), top_p)


class Rows(NamedTuple):
    """What a draw needs: logits float32 [R, W], their maxima [R, 1], settings, noise keys."""

    logits: torch.Tensor
    best: torch.Tensor
    settings: Settings
    keys: torch.Tensor

    def take(self, rows: torch.Tensor) -> Rows:
        """Some rows, given in ascending order."""
        if len(rows) == len(self.logits):
            return self
        return Rows(
            self.logits.index_select(0, rows),
            self.best[rows],
            Settings(*(column[rows] for column in self.settings)),
            self.keys[rows],
        )


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: torch.Tensor, noise: Noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [R] and the best logit [R] of each row, from float32 [R, W].

    Where the best logit is not finite, the id means nothing.
    """
    device, width = logits.device, logits.shape[1]
    best = logits.amax(1, keepdim=True)
    rows = Rows(logits, best, Settings.of(params, width, device), keys)
    ids = torch.empty(len(params), dtype=torch.int64, device=device)
    narrow = [i for i, p in enumerate(params) if _may_be_narrow(p)]
    wide = [i for i, p in enumerate(params) if not _may_be_narrow(p)]
    if narrow:
        index = torch.tensor(narrow, device=device)
        ids[index], settled = _draw_narrow(rows.take(index), [params[i] for i in narrow], noise)
        wide += [i for i, done in zip(narrow, settled.tolist(), strict=True) if not done]
    size = group_size(logits)
    for nucleus in (False, True):
        some = sorted(i for i in wide if (params[i].top_p < 1.0) == nucleus)
        for start in range(0, len(some), size):
            group = torch.tensor(some[start : start + size], device=device)
            ids[group] = _draw_wide(rows.take(group), noise, nucleus)
    return ids, best.squeeze(1)


def _may_be_narrow(params: SamplingParams) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < NUM_CANDIDATES


def _draw_narrow(
    rows: Rows, params: Sequence[SamplingParams], noise: Noise
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the best candidates only; also says for which rows they were enough, bool [R]."""
    scale, log_min_p, top_k, _ = rows.settings
    top = top_tokens(rows.logits, NUM_CANDIDATES)
    y = (top.values - rows.best).mul_(scale)
    bound = (top.bound - rows.best).mul_(scale)
    count = y.shape[1]
    kth = y.gather(1, (top_k - 1).clamp_(max=count - 1)).masked_fill_(top_k > count, -torch.inf)
    lowest = torch.maximum(log_min_p, kth)
    settled = lowest > bound
    if any(p.top_p < 1.0 for p in params):
        # top_p alone is a share of the whole row's mass, which the candidates do not hold.
        off = rows.logits.shape[1]
        alone = [p.top_p < 1.0 and not p.min_p > 0.0 and not 0 < p.top_k < off for p in params]
        whole = torch.tensor(
            [n for n, is_alone in enumerate(alone) if is_alone], dtype=torch.int64, device=y.device
        )
        lowest, settled = _nucleus(rows, y, bound, lowest, settled, whole)
    settled |= bound == -torch.inf
    score = noise.at(rows.keys, top.ids).add_(y).masked_fill_(y < lowest, -torch.inf)
    return top.ids.gather(1, score.argmax(1, keepdim=True)).squeeze(1), settled.squeeze(1)


def _nucleus(
    rows: Rows,
    y: torch.Tensor,
    bound: torch.Tensor,
    lowest: torch.Tensor,
    enough: torch.Tensor,
    whole: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest y [R, 1] after top_p too, and whether candidates above ``bound`` were enough.

    ``lowest`` and ``enough`` are the same after min_p and top_k; y [R, k] is in descending order;
    ``whole`` are the rows with top_p and nothing else.
    """
    top_p = rows.settings.top_p
    mass = y.exp().masked_fill_(y < lowest, 0.0)
    total = mass.sum(1, keepdim=True)
    if len(whole):
        total[whole] = exp_sums(rows.logits, rows.best, rows.settings.inverse_temperature, whole)
        enough[whole] = True
    outside = mass.cumsum(1).sub_(mass) >= top_p * total
    outside[:, 0] = False
    nucleus = y.masked_fill(outside | (y < lowest), torch.inf).amin(1, keepdim=True)
    return nucleus, enough & (nucleus > bound)


def _draw_wide(rows: Rows, noise: Noise, nucleus: bool) -> torch.Tensor:
    """Draw from whole rows, for any settings, top_p only if ``nucleus``: int64 [R]."""
    scale, log_min_p, top_k, _ = rows.settings
    y = (rows.logits - rows.best).mul_(scale)
    for row in true_rows((log_min_p > -torch.inf) | (top_k < y.shape[1])).tolist():
        kth = y[row].topk(int(top_k[row])).values[-1]
        y[row].masked_fill_(y[row] < torch.maximum(log_min_p[row], kth), -torch.inf)
    score = noise.everywhere(rows.keys)
    score += y[:, : score.shape[1]]
    ids = best_token(score).ids
    if nucleus:
        _keep_to_nucleus(ids, y, score, rows.settings.top_p)
    return ids


def _keep_to_nucleus(
    ids: torch.Tensor, y: torch.Tensor, score: torch.Tensor, top_p: torch.Tensor
) -> None:
    """Replace, in place, winners ``ids`` [R] that lie outside the nucleus by the best inside.

    No threshold is needed: a winner among all tokens that lies in the nucleus is the winner of the
    nucleus too, and else the nucleus lies above it, so that it is asked again there.
    """
    pending = torch.arange(len(ids), device=ids.device)
    mass = exp_of(y.clone())
    limit = top_p * row_sums(mass)
    while True:
        winner = y.gather(1, ids[pending].unsqueeze(1))
        above = row_sums(torch.gt(y, winner, out=torch.empty_like(y)).mul_(mass))
        again = true_rows((above >= limit) & (winner < 0))
        if not len(again):
            return
        pending, y, mass, limit = pending[again], y[again], mass[again], limit[again]
        score = score[again].masked_fill_(y[:, : score.shape[1]] <= winner[again], -torch.inf)
        ids[pending] = best_token(score).ids
