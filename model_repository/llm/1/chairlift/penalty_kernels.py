"""Penalties on a GPU: counts of every request's tokens stay there, and a step adds the new ones.

penalties.py sends all distinct tokens of a penalised request to the device at every step, which for
a long prompt is more than the step's other numbers together. A request's counts are V bytes for the
prompt and 4 V for the answer, from its first penalised token to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .device_copies import to_device
from .request import SamplingParams


class Penalised(NamedTuple):
    """A row of the batch, and the sequence whose penalties apply to it."""

    row: int
    uid: int
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]


class CountTables:
    """Counts of tokens by seat: one seat for each request that has penalties."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.uint8, device=device)
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._seats: dict[int, _Seat] = {}
        self._free: list[int] = []

    def apply_penalties(self, logits: torch.Tensor, rows: Sequence[Penalised]) -> None:
        """As ``penalties.apply_penalties``, in place on float32 [R, V]."""
        from chairlift_kernels.penalties import apply_penalties

        if not rows:
            return
        seats = [self._seat(row) for row in rows]
        self._count(seats, rows)
        places = np.zeros(len(logits), np.int64)
        settings = np.zeros((3, len(logits)), np.float32)
        settings[0] = 1.0
        for seat, (row, _, params, _, _) in zip(seats, rows, strict=True):
            places[row] = seat.place
            settings[:, row] = (
                params.repetition_penalty,
                params.presence_penalty,
                params.frequency_penalty,
            )
        device = logits.device
        columns = to_device(settings, device)
        apply_penalties(logits, self._prompt, self._output, to_device(places, device), *columns)

    def release(self, uid: int) -> None:
        """The request has ended."""
        seat = self._seats.pop(uid, None)
        if seat is not None:
            self._free.append(seat.place)

    def _seat(self, row: Penalised) -> _Seat:
        """The sequence's own seat; a new one holds its prompt if the repetition penalty asks."""
        seat = self._seats.get(row.uid)
        if seat is not None and seat.holds(row):
            return seat
        self.release(row.uid)
        if not self._free:
            self._grow()
        seat = self._seats[row.uid] = _Seat(self._free.pop(), row.params)
        self._prompt[seat.place].zero_()
        self._output[seat.place].zero_()
        if row.params.repetition_penalty != 1.0:
            ids = np.unique(np.asarray(row.prompt_ids, np.int64))
            ids = ids[(ids >= 0) & (ids < self._vocab_size)]
            self._prompt[seat.place].index_fill_(0, to_device(ids, self._prompt.device), 1)
        return seat

    def _grow(self) -> None:
        """Twice the seats; the first are for one request."""
        size = len(self._output)
        more = max(1, size)
        self._prompt = torch.cat((self._prompt, self._prompt.new_zeros(more, self._vocab_size)))
        self._output = torch.cat((self._output, self._output.new_zeros(more, self._vocab_size)))
        self._free += range(size, size + more)

    def _count(self, seats: Sequence[_Seat], rows: Sequence[Penalised]) -> None:
        """Add what is new at the end of every output."""
        places: list[int] = []
        for seat, row in zip(seats, rows, strict=True):
            start = seat.place * self._vocab_size
            places += [start + token for token in row.output_ids[seat.counted :]]
            seat.counted = len(row.output_ids)
            seat.last = row.output_ids[-1] if row.output_ids else 0
        if places:
            index = to_device(np.array(places, np.int64), self._output.device)
            ones = torch.ones(len(places), dtype=torch.int32, device=self._output.device)
            self._output.view(-1).index_add_(0, index, ones)


class _Seat:
    """A row of the tables, and how much of whose output is counted there."""

    __slots__ = ("counted", "last", "params", "place")

    def __init__(self, place: int, params: SamplingParams) -> None:
        self.place = place
        self.params = params
        self.counted = 0
        self.last = 0

    def holds(self, row: Penalised) -> bool:
        """Whether what is counted is a beginning of the row's output."""
        counted, output = self.counted, row.output_ids
        return self.params is row.params and (
            counted == 0 or (counted <= len(output) and output[counted - 1] == self.last)
        )
