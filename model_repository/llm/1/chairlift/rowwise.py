"""Reductions over rows of logits: no sorting, and only operators that torch vectorises.

Rows are float32 [R, W] with W from ``padded_width`` and -inf past the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Two levels of a tournament with FAN_IN divide a row evenly.
ROW_MULTIPLE = 64
# The best 128 of 64 rows of 49,152 on one core: torch.topk 12 ms; FAN_IN 4, 8, 16: 3.5, 3.3, 3.9.
FAN_IN = 8
# Block maxima are vectorised and argmax is not: 64 x 49,152 float32 takes 7.2 ms in one argmax and
# 1.0 ms so, bf16 14.5 and 2.0 ms.
ARGMAX_BLOCK = 256
# Passes over a whole vocabulary go in groups of about this many numbers: on a CPU 1 MiB stays in a
# core's cache (noise for a row costs 137 us in groups of 4 rows, 340 us in one of 64); a GPU wants
# few launches.
GROUP_SIZE = {"cpu": 1 << 18, "cuda": 1 << 25}


class Best(NamedTuple):
    """The winner of each row: ids int64 [R] and its value [R], NaN where the row holds a NaN."""

    ids: torch.Tensor
    values: torch.Tensor


class Candidates(NamedTuple):
    """The best k of each row, best first: values float32 [R, k], ids int64 [R, k].

    ``bound`` [R, 1] is the last value, or -inf where nothing was left out: every token above it is
    a candidate, while some of those that equal it may be missing.
    """

    values: torch.Tensor
    ids: torch.Tensor
    bound: torch.Tensor


def padded_width(vocab_size: int) -> int:
    """W for a vocabulary."""
    return -(-vocab_size // ROW_MULTIPLE) * ROW_MULTIPLE


def group_size(logits: torch.Tensor) -> int:
    """How many rows at a time suit passes over whole rows."""
    return max(1, GROUP_SIZE[logits.device.type] // logits.shape[1])


def true_rows(column: torch.Tensor) -> torch.Tensor:
    """Numbers of the rows, int64 [n], where a bool column [R, 1] holds."""
    return column.squeeze(1).nonzero().squeeze(1)


def best_token(logits: torch.Tensor) -> Best:
    """Argmax of [R, V] in any float type and any V; the lowest id wins a tie, NaN wins over all."""
    vocab_size = logits.shape[1]
    if logits.is_cuda or vocab_size < 2 * ARGMAX_BLOCK:
        ids = logits.argmax(1, keepdim=True)
        return Best(ids.squeeze(1), logits.gather(1, ids).squeeze(1))
    blocks = vocab_size // ARGMAX_BLOCK
    whole = blocks * ARGMAX_BLOCK
    maxima = logits[:, :whole].view(len(logits), blocks, ARGMAX_BLOCK).amax(2)
    if whole < vocab_size:
        maxima = torch.cat((maxima, logits[:, whole:].amax(1, keepdim=True)), 1)
    # The last window may reach back into a block that has lost, so it cannot change the winner.
    start = (maxima.argmax(1, keepdim=True) * ARGMAX_BLOCK).clamp_(max=vocab_size - ARGMAX_BLOCK)
    window = logits.gather(1, start + torch.arange(ARGMAX_BLOCK))
    place = window.argmax(1, keepdim=True)
    return Best((start + place).squeeze(1), window.gather(1, place).squeeze(1))


def top_tokens(logits: torch.Tensor, k: int) -> Candidates:
    """The best k; the order among equals is not defined.

    A tournament: the k best columns of maxima hold the k best tokens, so each level looks only into
    FAN_IN entries under each of k winners. Columns are strided, since a maximum over the outer
    dimension is vectorised.
    """
    levels = [logits]
    while levels[-1].shape[1] // FAN_IN >= 2 * k and levels[-1].shape[1] % FAN_IN == 0:
        levels.append(levels[-1].view(len(logits), FAN_IN, -1).amax(1))
    top = levels.pop()
    k = min(k, top.shape[1])
    values, ids = top.topk(k, sorted=not levels)
    while levels:
        level = levels.pop()
        below = torch.arange(0, level.shape[1], level.shape[1] // FAN_IN, device=level.device)
        ids = (ids.unsqueeze(1) + below.unsqueeze(1)).flatten(1)
        values, order = level.gather(1, ids).topk(k, sorted=not levels)
        ids = ids.gather(1, order)
    bound = values[:, -1:]
    return Candidates(
        values, ids, bound if k < logits.shape[1] else torch.full_like(bound, -torch.inf)
    )


def exp_sums(
    logits: torch.Tensor, best: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """sum exp((x - best) * scale), [n, 1], of ascending rows int64 [n]; best, scale are [R, 1]."""
    if len(rows) < len(logits):
        best, scale = best[rows], scale[rows]
    size = group_size(logits)
    sums = []
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        # A slice saves a copy: 48 us for a row of 49,152 instead of 65.
        some = logits[part] if len(rows) == len(logits) else logits.index_select(0, rows[part])
        sums.append(row_sums(exp_of((some - best[part]).mul_(scale[part]))))
    return torch.cat(sums)


def exp_of(y: torch.Tensor) -> torch.Tensor:
    """exp of y <= 0 in place, for sums: results below 1e-34 do not count and are slow to get."""
    return y.clamp_(min=-80.0).exp_()


def row_sums(numbers: torch.Tensor) -> torch.Tensor:
    """Sums [R, 1] in an order that R cannot change: torch shares one long sum among threads."""
    count, width = numbers.shape
    return numbers.view(count, ROW_MULTIPLE, width // ROW_MULTIPLE).sum(2).sum(1, keepdim=True)
