"""A step's numbers: for every token its id, position, and slot, whatever rows are mixed."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from chairlift.request import Request, SamplingParams
from chairlift.scheduler import Row, StepPlan
from chairlift.step_arrays import StepArrays

BLOCK_SIZE = 4


def request(uid: int, num_tokens: int, blocks: list[int]) -> Request:
    prompt = [uid * 1000 + position for position in range(num_tokens)]
    made = Request(uid, prompt, SamplingParams(max_tokens=4), seed=0, arrival=0.0)
    made.block_ids = blocks
    return made


@given(
    decodes=st.lists(st.integers(1, 20), max_size=5),
    prefills=st.lists(st.tuples(st.integers(0, 13), st.integers(2, 11)), max_size=4),
    seed=st.integers(0, 99),
)
def test_every_token_has_its_place(
    decodes: list[int], prefills: list[tuple[int, int]], seed: int
) -> None:
    spans = [(length - 1, 1) for length in decodes] + prefills
    if not spans:
        return
    free = list(range(1, 100))
    random.Random(seed).shuffle(free)
    rows = []
    for uid, (start, count) in enumerate(spans):
        blocks = [free.pop() for _ in range(-(-(start + count) // BLOCK_SIZE))]
        rows.append(Row(request(uid, start + count, blocks), start, count))
    arrays = StepArrays.of(StepPlan(rows[: len(decodes)], rows[len(decodes) :]), BLOCK_SIZE)

    wanted = [
        (uid * 1000 + position, position, row.request.block_ids[position // BLOCK_SIZE])
        for uid, row in enumerate(rows)
        for position in range(row.start, row.start + row.num_tokens)
    ]
    assert arrays.token_ids.tolist() == [token_id for token_id, _, _ in wanted]
    assert arrays.positions.tolist() == [position for _, position, _ in wanted]
    slots = [block * BLOCK_SIZE + position % BLOCK_SIZE for _, position, block in wanted]
    assert arrays.slots.tolist() == slots
    for index, row in enumerate(rows):
        first, after = arrays.query_start[index : index + 2]
        assert after - first == row.num_tokens
        assert arrays.positions[after - 1] + 1 == arrays.seq_lens[index]
        assert arrays.tables[index].tolist()[: len(row.request.block_ids)] == row.request.block_ids
        assert not arrays.tables[index][len(row.request.block_ids) :].any()
    assert arrays.max_query_len == max(count for _, count in spans)
    assert arrays.max_seq_len == max(start + count for start, count in spans)
    assert arrays.promised == []
