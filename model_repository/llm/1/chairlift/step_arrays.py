"""A step's numbers on the host, before they become tensors: no model, no device."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .scheduler import Row, StepPlan

Ints = np.ndarray[Any, np.dtype[np.int64]]
Ints32 = np.ndarray[Any, np.dtype[np.int32]]


class StepArrays(NamedTuple):
    """What ``StepBatch`` holds, as numpy arrays; see there for the shapes.

    ``promised`` are the rows whose token the step before this one draws: their id is 0 here.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    tables: Ints32
    query_start: Ints32
    seq_lens: Ints32
    max_query_len: int
    max_seq_len: int
    promised: list[int]

    @staticmethod
    def of(plan: StepPlan, block_size: int) -> StepArrays:
        """Decodes first, then the prompt chunks token by token.

        In lists as far as that goes: a forward on a CPU leaves nothing in the caches, and then each
        function of numpy takes 10 to 40 us for a few rows.
        """
        rows = plan.rows
        token_ids, promised = _decode_ids(plan.decodes)
        positions = [start for _, start, _ in plan.decodes]
        slots = [
            request.block_ids[start // block_size] * block_size + start % block_size
            for request, start, _ in plan.decodes
        ]
        for request, start, count in plan.prefills:
            token_ids += request.token_ids[start : start + count]
            positions += range(start, start + count)
            slots += _slots(request.block_ids, start, start + count, block_size)
        counts = [count for _, _, count in rows]
        seq_lens = [start + count for _, start, count in rows]
        return StepArrays(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            slots=np.array(slots, dtype=np.int64),
            tables=block_tables(rows),
            query_start=np.array([0, *accumulate(counts)], dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            promised=promised,
        )


def _decode_ids(decodes: list[Row]) -> tuple[list[int], list[int]]:
    """The token of each row, and the rows whose token the host doesn't know yet."""
    token_ids, promised = [], []
    for index, (request, start, _) in enumerate(decodes):
        if start < len(request.token_ids):
            token_ids.append(request.token_ids[start])
        else:
            token_ids.append(0)
            promised.append(index)
    return token_ids, promised


def _slots(block_ids: list[int], start: int, end: int, block_size: int) -> list[int]:
    """Of the positions from ``start`` to ``end``, block by block."""
    slots: list[int] = []
    while start < end:
        first = block_ids[start // block_size] * block_size + start % block_size
        count = min(block_size - start % block_size, end - start)
        slots += range(first, first + count)
        start += count
    return slots


def block_tables(rows: list[Row]) -> Ints32:
    """[R, W] with W the longest table; the null block behind each row's own."""
    width = max(len(row.request.block_ids) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.request.block_ids)] = row.request.block_ids
    return tables
