"""Edits of logits before sampling: bans, biases and penalties of all rows in two scatters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from .device_copies import to_device
from .request import SamplingParams

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


class Changes(NamedTuple):
    """Numbers to add to one row's logits; -inf bans, and also keeps a NaN a NaN."""

    ids: Ids
    values: Values


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated.

    Kept from step to step, because counting a long prompt at every token costs more than the
    sampling does; only new tokens are counted.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        distinct = distinct[(distinct >= 0) & (distinct < vocab_size)]
        self._size = len(distinct)
        self._ids = np.concatenate((distinct, np.zeros(64, np.int64)))
        self._generated = np.zeros(len(self._ids), np.float32)
        self._places = dict(zip(distinct.tolist(), range(self._size), strict=True))
        self._counted = 0
        self._last = 0

    def continues_with(self, output_ids: Sequence[int]) -> bool:
        """Whether the tokens counted so far are a beginning of ``output_ids``."""
        counted = self._counted
        return counted == 0 or (
            counted <= len(output_ids) and output_ids[counted - 1] == self._last
        )

    def count(self, output_ids: Sequence[int]) -> None:
        """Count what is new at the end of ``output_ids``."""
        for token in output_ids[self._counted :]:
            place = self._places.setdefault(token, self._size)
            if place == self._size:
                self._append(token)
            self._generated[place] += 1
            self._last = token
        self._counted = len(output_ids)

    def _append(self, token: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._generated = np.concatenate((self._generated, np.zeros_like(self._generated)))
        self._ids[self._size] = token
        self._size += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: self._size]

    @property
    def generated(self) -> Values:
        """How often each of ``ids`` was generated; 0 for one that only the prompt holds."""
        return self._generated[: self._size]


class BadWords:
    """Sequences that must not be completed, found by the last generated token."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self.always: list[int] = []
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) == 1:
                self.always.append(word[0])
            elif word:
                self._after.setdefault(word[-2], []).append(word)

    def __bool__(self) -> bool:
        return bool(self._after)

    def banned_after(self, output_ids: Sequence[int]) -> list[int]:
        """Last tokens of the sequences whose beginning is the tail of ``output_ids``."""
        if not output_ids:
            return []
        return [
            word[-1]
            for word in self._after.get(output_ids[-1], ())
            if tuple(output_ids[-(len(word) - 1) :]) == word[:-1]
        ]


class RequestEdits:
    """What one request's settings do to its logits, prepared once."""

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: frozenset[int],
        bad_word_ids: Iterable[tuple[int, ...]],
        vocab_size: int,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        self._bad_words = BadWords(bad_word_ids)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_ids)
        self._ends = sorted(ends) if params.min_tokens > 0 else []
        fixed = dict.fromkeys(self._bad_words.always, -np.inf)
        fixed = {**dict(params.logit_bias), **fixed}
        self._fixed = self._changes(list(fixed), list(fixed.values()))
        self._counts: TokenCounts | None = None
        self.penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )

    @property
    def ever_wanted(self) -> bool:
        return self.wanted(0)

    def wanted(self, num_outputs: int) -> bool:
        """Whether the next step needs any edit."""
        return (
            self.penalised
            or len(self._fixed.ids) > 0
            or bool(self._bad_words)
            or (bool(self._ends) and num_outputs < self._params.min_tokens)
        )

    def changes(self, output_ids: Sequence[int]) -> list[Changes]:
        """Biases, banned words, and ends that come too early."""
        banned = self._bad_words.banned_after(output_ids) if self._bad_words else []
        if len(output_ids) < self._params.min_tokens:
            banned += self._ends
        changes = [self._fixed] if len(self._fixed.ids) else []
        if banned:
            changes.append(self._changes(banned, [-np.inf] * len(banned)))
        return changes

    def counts(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> TokenCounts:
        """Up-to-date token counts; the prompt counts only for the repetition penalty."""
        counts = self._counts
        if counts is None or not counts.continues_with(output_ids):
            repeats = self._params.repetition_penalty != 1.0
            counts = TokenCounts(prompt_ids if repeats else (), self._vocab_size)
        counts.count(output_ids)
        self._counts = counts
        return counts

    def _changes(self, ids: Sequence[int], values: Sequence[float]) -> Changes:
        """Ids outside the vocabulary are left out: they would be indices of another row."""
        id_array = np.asarray(ids, np.int64)
        inside = (id_array >= 0) & (id_array < self._vocab_size)
        return Changes(id_array[inside], np.asarray(values, np.float32)[inside])


class PenalisedRow(NamedTuple):
    """A row of the batch with the tokens that its penalties apply to."""

    row: int
    params: SamplingParams
    counts: TokenCounts


def add_changes(logits: torch.Tensor, changes: Sequence[tuple[int, Changes]]) -> None:
    """logits[row, id] += value for all, in place; ``logits`` is contiguous float32 [R, W]."""
    if not changes:
        return
    width = logits.shape[1]
    places = np.concatenate([change.ids + row * width for row, change in changes])
    values = np.concatenate([change.values for _, change in changes])
    device = logits.device
    logits.view(-1).index_add_(0, to_device(places, device), to_device(values, device))


def apply_penalties(logits: torch.Tensor, rows: Sequence[PenalisedRow]) -> None:
    """Repetition, frequency and presence penalties in place on contiguous float32 [R, W].

    x = x * repetition if x < 0 else x / repetition, for tokens of prompt and output;
    x = x - frequency * count - presence * (count > 0), with counts of the output only.
    """
    if not rows:
        return
    width = logits.shape[1]
    sizes = [len(row.counts.ids) for row in rows]
    places = np.concatenate([row.counts.ids + row.row * width for row in rows])
    counts = np.concatenate([row.counts.generated for row in rows])
    settings = np.asarray(
        [
            (p.params.repetition_penalty, p.params.frequency_penalty, p.params.presence_penalty)
            for p in rows
        ],
        np.float32,
    )
    repetition, frequency, presence = np.repeat(settings, sizes, axis=0).T
    subtracted = frequency * counts + presence * (counts > 0)
    device = logits.device
    index = to_device(places, device)
    factor = to_device(np.ascontiguousarray(repetition), device)
    flat = logits.view(-1)
    values = flat[index]
    values = torch.where(values < 0, values * factor, values / factor)
    flat[index] = values - to_device(subtracted, device)
