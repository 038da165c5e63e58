"""Log-probabilities of tokens under the model itself, before any penalty or temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .request import TokenLogprobs
from .rowwise import exp_sums, top_tokens, true_rows

# Covers the 20 alternatives that servers usually allow, and the rank of almost every drawn token.
MIN_CANDIDATES = 64


def token_logprobs(
    logits: torch.Tensor, vocab_size: int, chosen: torch.Tensor, top_n: Sequence[int]
) -> list[TokenLogprobs]:
    """Reports for tokens int64 [R] from float32 [R, W] (-inf past the vocabulary), ``top_n`` R.

    log p(t) = x_t - max x - log sum exp(x - max x). The rank is 1 + the number of strictly greater
    logits; among equal alternatives the lower id comes first, as in greedy choice.
    """
    longest = min(max(top_n), vocab_size)
    top = top_tokens(logits, max(MIN_CANDIDATES, longest + 1))
    best = top.values[:, :1]
    every_row = torch.arange(len(logits), device=logits.device)
    normaliser = best + exp_sums(logits, best, torch.ones_like(best), every_row).log_()
    chosen_logits = logits.gather(1, chosen.unsqueeze(1))
    ranks = (top.values > chosen_logits).sum(1, keepdim=True) + 1
    outside = true_rows((chosen_logits <= top.bound) & (top.bound > -torch.inf))
    if len(outside):
        greater = logits.index_select(0, outside) > chosen_logits[outside]
        ranks[outside] = greater.sum(1, keepdim=True) + 1
    values, ids = _alternatives(logits[:, :vocab_size], top.values, top.ids, longest)
    columns = torch.cat((chosen_logits, values), 1).sub_(normaliser).clamp_(max=0.0)
    return [
        TokenLogprobs(first, rank, tuple(zip(row_ids[:n], others[:n], strict=True)))
        for (first, *others), rank, row_ids, n in zip(
            columns.tolist(), ranks.squeeze(1).tolist(), ids.tolist(), top_n, strict=True
        )
    ]


def _alternatives(
    logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` candidates by value, then id: values and ids [R, count]."""
    if count == 0:
        return values[:, :0], ids[:, :0]
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    tied = true_rows(values[:, count - 1 : count] <= values[:, -1:])
    values, ids = values[:, :count], ids[:, :count]
    if len(tied) and values.shape[1] < logits.shape[1]:
        # So many equals that the candidates may lack the lowest ids among them.
        ordered = logits[tied].sort(dim=1, descending=True, stable=True)
        values[tied], ids[tied] = ordered.values[:, :count], ordered.indices[:, :count]
    return values, ids
