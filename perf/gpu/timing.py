"""How long GPU work takes, the ceilings to hold it against, and the tables that results go into."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Call = Callable[[], object]
Value = str | float | int
# Ten replays or more of a graph of 20 ms give medians within 1 % on most machines.
REPLAYS = 11
TARGET_MS = 20.0


class Table(NamedTuple):
    """Results of one part: rows of column -> value, and what the reader must know about them."""

    title: str
    note: str
    rows: Sequence[dict[str, Value]]


class Ceilings(NamedTuple):
    """What the device does at best: GB/s of a copy, bytes read and written; TFLOP/s of bf16."""

    copy_gb_s: float
    matmul_tflop_s: float


class Bench(NamedTuple):
    """Where to measure; `smoke` shrinks every size, to try the scripts where there is no GPU."""

    device: torch.device
    smoke: bool

    def pick(self, size: int, small: int) -> int:
        return small if self.smoke else size

    def forget(self) -> None:
        """Give back what nobody refers to any more: the next engine sizes its pool by it."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def seconds(self, calls: Sequence[Call]) -> float:
        """Median time of one call; several calls on different data keep the L2 cache honest."""
        if self.device.type == "cpu":
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        return _graph_seconds(calls)


def _graph_seconds(calls: Sequence[Call]) -> float:
    """Replays of a CUDA graph, so that launching from Python is not what is measured."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:  # compiles, and fills the allocator
            call()
        side.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(side)
        calls[0]()
        end.record(side)
        end.synchronize()
    once = max(begin.elapsed_time(end), 0.002)
    rounds = max(1, int(TARGET_MS / once / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    times = []
    for _ in range(REPLAYS + 2):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:]) / rounds / len(calls)


def measure_ceilings(bench: Bench) -> tuple[Ceilings, Table]:
    """A large copy, and a product of random bf16 matrices (zeros would run faster)."""
    elements = bench.pick(2 * 1024**3, 1024)
    copy = _copy_rate(bench, elements)
    size = bench.pick(8192, 64)
    a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    matmul = 2 * size**3 / bench.seconds([lambda: a @ b]) / 1e12
    ceilings = Ceilings(copy, matmul)
    note = f"copy of {elements * 2 / 1e9:.1f} GB; bf16 product of {size} x {size} random matrices"
    return ceilings, Table("Ceilings", note, [
        {"what": "copy", "GB/s": round(copy)}, {"what": "matmul", "TFLOP/s": round(matmul)},
    ])  # fmt: skip


def _copy_rate(bench: Bench, elements: int) -> float:
    """GB/s of a copy of bf16 elements."""
    source = torch.empty(elements, dtype=torch.bfloat16, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds([lambda: target.copy_(source)]) / 1e9
