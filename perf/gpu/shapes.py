"""Times of launch shapes beside those of launch_table.py: what may change a line of that table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chairlift_kernels import attention, launch_table
from chairlift_kernels.launch_table import Shape
from chairlift_kernels.ops import TritonOps
from perf.gpu.attention import Case, Prepared, prepare
from perf.gpu.timing import Bench, Table

DECODE_SHAPES = [
    Shape(16, 128, 4, 2), Shape(16, 128, 4, 3), Shape(16, 64, 4, 2), Shape(16, 64, 4, 3),
    Shape(16, 64, 4, 5), Shape(16, 128, 8, 2), Shape(16, 32, 2, 4),
]  # fmt: skip
PREFILL_SHAPES = [
    Shape(128, 64, 8, 3), Shape(128, 64, 8, 2), Shape(128, 128, 8, 2), Shape(128, 128, 8, 3),
    Shape(64, 64, 4, 3), Shape(64, 128, 4, 2),
]  # fmt: skip
DECODE_CASES = [
    Case("8B", 1, 8192), Case("8B", 1, 65_536), Case("8B", 8, 8192), Case("8B", 64, 8192)
]  # fmt: skip
SPLITS = (256, 512, 1024)


@contextmanager
def _patched(shape: Shape, family: str, split: int) -> Iterator[None]:
    """Another shape for D 128 and another split length, for measuring only."""
    decode, prefill = launch_table.DECODE, launch_table.PREFILL[family]
    kept = decode[128], prefill[128], attention.SPLIT_KEYS
    decode[128] = prefill[128] = shape
    attention.SPLIT_KEYS = split
    try:
        yield
    finally:
        decode[128], prefill[128], attention.SPLIT_KEYS = kept


def shapes_table(bench: Bench, ops: TritonOps) -> Table:
    """D 128 in bf16; the split length is tried with the table's own decode shape."""
    family = launch_table.family_of(ops.capability)
    own = launch_table.DECODE[128]
    decodes = [prepare(bench, ops, case) for case in DECODE_CASES]
    prompt = prepare(bench, ops, Case("8B", 1, 8192, 8192))
    tries = [("decode", shape, launch_table.SPLIT_KEYS, decodes) for shape in DECODE_SHAPES]
    tries += [("decode", own, split, decodes) for split in SPLITS]
    tries += [("prefill", shape, launch_table.SPLIT_KEYS, [prompt]) for shape in PREFILL_SHAPES]
    rows = [
        _row(bench, ops, kind, shape, split, family, prepared)
        for kind, shape, split, prepared in tries
    ]
    return Table("Launch shapes", "us; columns are rows x keys; D 128, 32 heads, 8 KV heads", rows)


def _row(
    bench: Bench, ops: TritonOps, kind: str, shape: Shape, split: int, family: str,
    prepared: list[Prepared],
) -> dict[str, str | float | int]:  # fmt: skip
    row: dict[str, str | float | int] = {"kind": kind, "shape": str(tuple(shape)), "split": split}
    with _patched(shape, family, split):
        for one in prepared:
            name = f"{one.case.rows} x {one.case.keys}"
            try:
                row[name] = round(one.seconds(bench, ops) * 1e6, 1)
            except Exception as error:  # a shape may not fit this device: that is a result too
                row[name] = type(error).__name__
    return row
