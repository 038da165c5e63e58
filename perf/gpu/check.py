"""Measure the kernels on this machine's GPU, and write JSON and Markdown.

    python -m perf.gpu.check [--out perf/results/gpu-kernels] [--parts int64,decode]
    TRITON_INTERPRET=1 python -m perf.gpu.check --smoke --out smoke

with PYTHONPATH=kernels:. from the checkout. Each part's results are written as soon as it ends; one
that fails is reported, does not stop the others, and makes the exit status 1. --smoke tries the
scripts themselves: tiny sizes, on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from chairlift_kernels.ops import TritonOps
from perf.gpu.attention import decode_table, prefill_table
from perf.gpu.large_cache import int64_table
from perf.gpu.sampling import layer_table, sampling_table
from perf.gpu.shapes import shapes_table
from perf.gpu.tables import write_tables
from perf.gpu.timing import Bench, Table, measure_ceilings

PARTS = ("int64", "decode", "prefill", "layer", "sampling", "shapes")


def run(bench: Bench, parts: Sequence[str], out: Path) -> int:
    """Measure each part; returns how many failed."""
    ops = TritonOps(bench.device)
    ceilings, first = measure_ceilings(bench)
    makers: dict[str, Callable[[], Table]] = {
        "int64": lambda: int64_table(bench, ops),
        "decode": lambda: decode_table(bench, ops, ceilings),
        "prefill": lambda: prefill_table(bench, ops, ceilings),
        "layer": lambda: layer_table(bench, ops, ceilings),
        "sampling": lambda: sampling_table(bench),
        "shapes": lambda: shapes_table(bench, ops),
    }
    tables, failed = [first], 0
    for part in parts:
        start = time.monotonic()
        try:
            tables.append(makers[part]())
        except Exception:  # the other parts are worth having
            failed += 1
            tables.append(Table(f"{part} failed", f"```\n{traceback.format_exc()}\n```", []))
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
        write_tables("Kernels on a GPU", bench, tables, out)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("perf/results/gpu-kernels"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.smoke else "cuda")
    return min(run(Bench(device, options.smoke), options.parts.split(","), options.out), 1)


if __name__ == "__main__":
    sys.exit(main())
