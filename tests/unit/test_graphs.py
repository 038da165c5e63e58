"""Which graph a decode step takes, and what is in its buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.attention import ShapeProbe, StepBatch
from chairlift.graphs import LENGTHS, DecodeGraphs, GraphShape, graph_shapes
from chairlift.step_arrays import StepArrays
from tests.engine.replayed import Recorder

BLOCK = 4
SHAPES = [GraphShape(rows, keys) for rows in (6, 4, 2, 1) for keys in (40, 16)]


def arrays(seq_lens: list[int], table_width: int, queries: int = 1) -> StepArrays:
    rows = len(seq_lens)
    tables = np.arange(1, 1 + rows * table_width, dtype=np.int32).reshape(rows, table_width)
    return StepArrays(
        token_ids=np.arange(10, 10 + rows),
        positions=np.array(seq_lens) - 1,
        slots=np.arange(100, 100 + rows),
        tables=tables,
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        max_query_len=queries,
        max_seq_len=max(seq_lens),
        promised=[],
    )


class Model:
    """Its logits tell every number of the batch that a row may depend on."""

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def __call__(self, batch: StepBatch) -> Tensor:
        self.batches.append(batch)
        columns = [batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens.long()]
        return torch.stack([*columns, batch.block_tables.long().sum(1), batch.logit_rows], dim=1)


def nothing(_: Tensor) -> None:
    pass


@pytest.fixture
def graphs() -> DecodeGraphs:
    made = DecodeGraphs(Model(), ShapeProbe(), SHAPES, BLOCK, torch.device("cpu"))
    made.capture(Recorder())
    return made


def test_the_table_doubles_up_to_the_limit_and_starts_with_the_largest() -> None:
    shapes = graph_shapes(48, 100_000)
    assert list(dict.fromkeys(shape.rows for shape in shapes)) == [48, 32, 16, 8, 4, 2, 1]
    assert {shape.max_seq_len for shape in shapes} == {*LENGTHS, 100_000}
    assert shapes[0] == GraphShape(48, 100_000) and shapes[-1] == GraphShape(1, LENGTHS[0])
    assert graph_shapes(1, 512) == [GraphShape(1, 512)]
    assert graph_shapes(64, LENGTHS[0])[0] == GraphShape(64, LENGTHS[0])


@pytest.mark.parametrize(
    ("seq_lens", "expected"),
    [
        ([5], GraphShape(1, 16)),
        ([16, 3], GraphShape(2, 16)),
        ([17, 3], GraphShape(2, 40)),
        ([1, 1, 40], GraphShape(4, 40)),
        ([9] * 5, GraphShape(6, 16)),
        ([9] * 7, None),
        ([41], None),
    ],
)
def test_the_smallest_that_fits(
    graphs: DecodeGraphs, seq_lens: list[int], expected: GraphShape | None
) -> None:
    assert graphs.find(arrays(seq_lens, 11)) == expected


def test_prompts_run_without_a_graph(graphs: DecodeGraphs) -> None:
    assert graphs.find(arrays([5, 9], 3, queries=4)) is None


@pytest.mark.parametrize("table_width", [1, 3, 12])
def test_rows_are_right_and_padding_is_harmless(graphs: DecodeGraphs, table_width: int) -> None:
    """After a larger step too: nothing of it is left in the padding rows."""
    large, small = arrays([16] * 6, table_width), arrays([3, 7, 5], table_width)
    for step in (large, small):
        shape = graphs.find(step)
        assert shape is not None
        logits = graphs.run(shape, step, nothing)
        held = step.tables[:, : -(-shape.max_seq_len // BLOCK)]
        expected = np.stack(
            [step.token_ids, step.positions, step.slots, step.seq_lens, held.sum(1)], axis=1
        )
        assert logits.shape[0] == len(step.seq_lens)
        assert torch.equal(logits[:, :5], torch.from_numpy(expected))
    captured: Any = graphs._captured[GraphShape(4, 16)]
    assert captured.output[3].tolist() == [0, 0, -1, 0, 0, 3]


def test_a_token_that_the_host_does_not_know_is_filled_in(graphs: DecodeGraphs) -> None:
    step = arrays([3, 7], 2)
    logits = graphs.run(GraphShape(2, 16), step, lambda ids: ids.__setitem__(1, 77))
    assert logits[:, 0].tolist() == [10, 77]


def test_sizes_on_the_host_depend_on_the_shape_alone(graphs: DecodeGraphs) -> None:
    """What a launch grid is made of."""
    model: Any = graphs._forward
    for shape, batch in zip(SHAPES, model.batches, strict=False):
        assert (batch.num_decodes, batch.max_seq_len) == shape
        assert batch.max_query_len == 1
        assert batch.block_tables.shape == (shape.rows, -(-shape.max_seq_len // BLOCK))
        assert batch.query_start.tolist() == list(range(shape.rows + 1))


def test_a_model_that_cannot_be_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def model(batch: StepBatch) -> Tensor:
        calls.append(batch.num_decodes)
        if batch.num_decodes < 4:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(batch.num_decodes, 3)

    graphs = DecodeGraphs(model, ShapeProbe(), SHAPES, BLOCK, torch.device("cpu"))
    graphs.capture(Recorder())
    assert graphs.find(arrays([5], 2)) is None
    assert "without CUDA graphs" in caplog.text and "not permitted" in caplog.text
    assert calls == sorted(calls, reverse=True)
