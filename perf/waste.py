#!/usr/bin/env python3
"""KV slots that hold no token, against those in use, on workload A. `python perf/waste.py`.

Counted after every step over all blocks in use, a shared block once. Nothing here is timed, so the
machine may be busy.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from measuring.own_engine import OwnEngine
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from measuring.workload import load_workload

AIM = 0.04


class Slots(NamedTuple):
    """KV slots after one step: all of the blocks in use, and those that hold a token."""

    used: int
    filled: int


def count_slots(requests: Iterable[Any], block_size: int) -> Slots:
    """Slots of the blocks that running requests hold."""
    filled: dict[int, int] = {}
    for request in requests:
        for index, block in enumerate(request.block_ids):
            tokens = min(block_size, max(0, request.num_computed - index * block_size))
            filled[block] = max(filled.get(block, 0), tokens)
    return Slots(len(filled) * block_size, sum(filled.values()))


def main() -> None:
    args = parse_arguments()
    steps: list[Slots] = []
    engine = OwnEngine(
        {"model": str(args.model), "threads": args.threads, "block_size": args.block_size},
        after_emit=lambda: steps.append(
            count_slots(engine.assembly.scheduler.running, args.block_size)
        ),
    )
    try:
        engine.run(load_workload(args.workload))
    finally:
        engine.close()
    write(args, [each for each in steps if each.used])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="A")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "waste")
    return parser.parse_args()


def write(args: argparse.Namespace, steps: list[Slots]) -> None:
    used, filled = (sum(column) for column in zip(*steps, strict=True))
    worst = max(1 - each.filled / each.used for each in steps)
    share = 1 - filled / used
    rows = [[len(steps), used, used - filled, f"{share:.2%}", f"{worst:.2%}", f"{AIM:.0%}"]]
    headings = ["steps", "slots in use, summed over steps", "of them without a token", "share"]
    text = table([*headings, "worst step", "aim below"], rows)
    facts = about(workload=args.workload, block_size=args.block_size)
    data = {"share": share, "worst": worst, "steps": [list(each) for each in steps]}
    save(args.out, "KV slots that hold no token", facts, data, text)


if __name__ == "__main__":
    main()
