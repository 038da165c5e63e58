"""A step's numbers on the host, before they become tensors: no model, no device."""

from __future__ import annotations

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
    promised: list[int]

    @staticmethod
    def of(plan: StepPlan, block_size: int) -> StepArrays:
        """Decodes first, then the prompt chunks token by token."""
        rows = plan.rows
        token_ids, promised = _decode_ids(plan.decodes)
        for row in plan.prefills:
            token_ids += row.request.token_ids[row.start : row.start + row.num_tokens]
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(len(token_ids)) - query_start[row_of_token] + starts[row_of_token]
        tables = block_tables(rows)
        blocks = tables[row_of_token, positions // block_size].astype(np.int64)
        return StepArrays(
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            tables=tables,
            query_start=query_start,
            seq_lens=(starts + counts).astype(np.int32),
            max_query_len=int(counts.max()),
            promised=promised,
        )

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())


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


def block_tables(rows: list[Row]) -> Ints32:
    """[R, W] with W the longest table; the null block behind each row's own."""
    width = max(len(row.request.block_ids) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for index, row in enumerate(rows):
        tables[index, : len(row.request.block_ids)] = row.request.block_ids
    return tables
