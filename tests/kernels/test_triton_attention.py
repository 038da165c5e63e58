"""Paged attention against float64, over the shapes that other servers got wrong.

Unused cache entries are NaN throughout. Ids like A4 are those of the collected fault reports.
"""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from chairlift_kernels.kv_cache import FP8
from chairlift_kernels.ops import TritonOps
from chairlift_kernels.reference import AttentionOptions
from tests.kernels.paged_batch import Layer, assert_close, build

HALF = torch.float16
# Two decode rows, a new prompt, a chunk behind cached keys, and one token in the prefill shape.
MIXED = [(1, 1), (1, 37), (70, 70), (19, 83), (1, 50)]


@pytest.fixture(scope="module")
def ops(device: torch.device) -> TritonOps:
    return TritonOps(device)


@pytest.fixture
def exact_dot(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, products of tiles whose sums don't depend on a row's place in its tile.

    On some processors (Zen 3) they do in NumPy's BLAS. Sums of fp16 products round nowhere in fp64.
    """
    if ops.device.type == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot_in_fp64)


def _dot_in_fp64(_builder: Any, a: Any, b: Any, c: Any, *_options: Any) -> Any:
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(c.data.dtype)
    return interpreter.TensorHandle(product + c.data, c.dtype.scalar)


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17])
def test_a4_few_decode_rows_at_every_short_context(ops: TritonOps, rows: int) -> None:
    for first in range(1, 34, rows):
        contexts = [min(n, 33) for n in range(first, first + rows)]
        batch = build(ops, [(1, n) for n in contexts], Layer(4, 2, 64, 64), HALF)
        assert_close(batch.attend(ops), batch.expected(), HALF)


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17])
def test_a4_prompts_of_few_tokens(ops: TritonOps, rows: int) -> None:
    prompts = [(n, n) for n in islice(cycle(range(2, 34)), rows * 2)]
    batch = build(ops, prompts, Layer(4, 2, 64, 64), HALF)
    assert_close(batch.attend(ops), batch.expected(), HALF)


@pytest.mark.parametrize("size", [48, 64, 80, 96, 112, 128, 256])
def test_a2_head_sizes(ops: TritonOps, size: int, triton_dtype: torch.dtype) -> None:
    batch = build(ops, MIXED, Layer(2, 1, size, size), triton_dtype)
    assert_close(batch.attend(ops), batch.expected(), triton_dtype)


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (14, 2), (9, 3), (4, 4), (8, 1), (20, 1)])
def test_a3_head_ratios(ops: TritonOps, heads: tuple[int, int]) -> None:
    batch = build(ops, MIXED, Layer(*heads, 64, 64), HALF)
    assert_close(batch.attend(ops), batch.expected(), HALF)


def test_values_narrower_and_wider_than_keys(ops: TritonOps) -> None:
    for dims in ((96, 64), (64, 128)):
        batch = build(ops, MIXED, Layer(4, 2, *dims), HALF)
        assert_close(batch.attend(ops), batch.expected(), HALF)


@pytest.mark.parametrize("block_size", [1, 8, 24, 64, 256])
def test_block_sizes(ops: TritonOps, block_size: int) -> None:
    batch = build(ops, MIXED, Layer(4, 2, 64, 64, block_size), HALF)
    assert_close(batch.attend(ops), batch.expected(), HALF)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33, 63, 64, 65, 200])
def test_windows_on_and_off_block_edges(ops: TritonOps, window: int) -> None:
    rows = [(1, 64), (1, 65), (1, 150), (70, 70), (40, 170)]
    batch = build(ops, rows, Layer(4, 2, 64, 64), HALF)
    options = batch.plain()._replace(window=window)
    assert_close(batch.attend(ops, options), batch.expected(options), HALF)


def test_blocks_behind_the_window_are_not_read(ops: TritonOps) -> None:
    window, block_size = 40, 16
    batch = build(ops, [(1, 150), (30, 200)], Layer(4, 2, 64, 64, block_size), HALF)
    options = batch.plain()._replace(window=window)
    expected = batch.expected(options)
    for row, (queries, keys) in enumerate(zip(batch.queries, batch.keys, strict=True)):
        freed = (keys - queries - window + 1) // block_size
        assert freed > 0
        batch.tables[row, :freed] = 0  # block 0 is NaN
    assert_close(batch.attend(ops, options), expected, HALF)


@pytest.mark.parametrize("window", [None, 1, 511, 512, 513, 700])
def test_contexts_of_several_splits(ops: TritonOps, window: int | None) -> None:
    rows = [(1, n) for n in (3, 511, 512, 513, 1024, 1025, 1537)]
    batch = build(ops, rows, Layer(4, 1, 64, 64), HALF)
    options = batch.plain()._replace(window=window)
    assert_close(batch.attend(ops, options), batch.expected(options), HALF)


def test_more_splits_than_one_chunk_of_the_merge(ops: TritonOps) -> None:
    batch = build(ops, [(1, 10_000), (1, 600)], Layer(2, 1, 64, 64), HALF)
    assert_close(batch.attend(ops), batch.expected(), HALF)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 40])
def test_softcap_and_sinks(ops: TritonOps, softcap: float | None, window: int | None) -> None:
    rows = [(1, 5), (1, 700), (50, 90)]
    batch = build(ops, rows, Layer(6, 2, 64, 64), HALF)
    sinks = torch.tensor([-4.0, 0.0, 1.0, 3.0, 8.0, -1.0], device=ops.device)
    options = AttentionOptions(0.3, window, softcap, sinks)
    assert_close(batch.attend(ops, options), batch.expected(options), HALF)


def test_softcap_of_scores_that_overflow_an_exponential(ops: TritonOps) -> None:
    batch = build(ops, [(1, 40), (20, 60)], Layer(2, 1, 64, 64), torch.float32)
    options = batch.plain()._replace(scale=500.0, softcap=30.0)
    assert_close(batch.attend(ops, options), batch.expected(options), torch.float32)


def test_rows_without_keys_give_zero_and_rows_without_queries_nothing(ops: TritonOps) -> None:
    """Padding of a CUDA graph's batch: decode rows of length 0, prefill rows without tokens."""
    for longest in (40, 700):
        rows = [(1, 0), (1, longest), (1, 0), (5, 25), (0, 0), (0, 30), (2, 2)]
        batch = build(ops, rows, Layer(4, 2, 64, 64), HALF)
        out = batch.attend(ops)
        assert_close(out, batch.expected(), HALF)
        assert (out[0] == 0).all() and (out[2] == 0).all()


def test_tables_that_are_full_to_the_last_slot(ops: TritonOps) -> None:
    batch = build(ops, [(1, 64), (64, 64), (3, 64)], Layer(4, 2, 64, 64), HALF)
    assert batch.tables.shape[1] * 16 == 64
    assert_close(batch.attend(ops), batch.expected(), HALF)


def test_queries_of_any_stride(ops: TritonOps) -> None:
    """Models hand over [T, H, D] or [H, T, D] memory, or a slice of the q-k-v projection."""
    batch = build(ops, MIXED, Layer(4, 2, 64, 64), HALF)
    expected = batch.attend(ops)
    by_head = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat((batch.q, batch.q), dim=1)[:, :4]
    for q in (by_head, wide):
        assert not q.is_contiguous()
        assert torch.equal(batch._replace(q=q).attend(ops), expected)


@pytest.mark.parametrize("chunk", [16, 24])
def test_a1_the_answer_does_not_depend_on_the_chunk_size(
    ops: TritonOps, chunk: int, exact_dot: None
) -> None:
    """Bit for bit: tiles lie at fixed positions, so that every row adds in the same order."""
    lengths = {chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3 * chunk + 5}
    for length in sorted(lengths):
        decodes = [(1, n) for n in (3, 20, 33)]
        whole = build(ops, [*decodes, (length, length)], Layer(4, 2, 64, 64), HALF)
        out = whole.attend(ops)
        assert_close(out, whole.expected(), HALF)
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            part = whole._replace(
                q=whole.q[3 + begin : 3 + end],
                tables=whole.tables[3:],
                starts=torch.tensor([0, end - begin], dtype=torch.int32, device=ops.device),
                lengths=torch.tensor([end], dtype=torch.int32, device=ops.device),
                queries=(end - begin,),
                keys=(end,),
            )
            if end - begin > 1:
                assert torch.equal(part.attend(ops), out[3 + begin : 3 + end])


def test_a_decode_row_has_the_same_bits_alone_and_beside_a_long_one(ops: TritonOps) -> None:
    together = build(ops, [(1, 300), (1, 1500)], Layer(8, 2, 64, 64), HALF)
    out = together.attend(ops)
    alone = together._replace(
        q=together.q[:1], starts=together.starts[:2], lengths=together.lengths[:1],
        tables=together.tables[:1], queries=(1,), keys=(300,),
    )  # fmt: skip
    assert torch.equal(alone.attend(ops), out[:1])


def test_e4m3_cache_with_scales(ops: TritonOps) -> None:
    if ops.device.type == "cuda" and ops.capability < (8, 9):
        with pytest.raises(ValueError, match="sm_89"):
            ops.allocate_cache([(2, 64, 64)], 2, 16, FP8)
        return
    fp8_ops = TritonOps(ops.device, capability=max(ops.capability, (9, 0)))
    scales = (torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.005]))
    scales = tuple(scale.to(ops.device) for scale in scales)
    batch = build(fp8_ops, MIXED, Layer(4, 2, 64, 64), HALF, FP8, [scales])
    assert_close(batch.attend(fp8_ops), batch.expected(), HALF)


def test_what_cannot_be_done_is_refused(ops: TritonOps) -> None:
    batch = build(ops, [(1, 5)], Layer(2, 1, 64, 64), HALF)
    with pytest.raises(ValueError, match="window 0"):
        batch.attend(ops, batch.plain()._replace(window=0))
    with pytest.raises(ValueError, match="256 is the limit"):
        ops.allocate_cache([(1, 288, 64)], 2)
    with pytest.raises(ValueError, match="e4m3 cache needs sm_89"):
        TritonOps("cpu", capability=(8, 0)).allocate_cache([(1, 64, 64)], 2, 16, FP8)
