#!/usr/bin/env python3
"""A long run with clients of all kinds: does anything grow, slow down, or go wrong?

    python perf/soak.py [--seconds 120] [--clients 8] [--out FILE] [--log FILE]
                        [--set key=value ...]

Starts a server, lets clients stream, cancel, vanish, and be refused, and samples memory, files,
shared memory, and KV blocks. Ends with 1 where memory grows beyond noise, a request ends as it must
not, the canary's answer changes, or something is left open at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from psutil import NoSuchProcess
from soaking.footprint import Footprint, ServerEnded, measure
from soaking.plot import plot
from soaking.traffic import Client, Notes, canary
from soaking.verdict import Slope, latencies, slopes

from chairlift_client.settings import parse_assignments
from chairlift_client.trial import TrialServer, trial_server

MIB = 1 << 20
SAMPLES = 720
# The system gives the pool memory when a block is first written, and blocks that were never used go
# out first: a pool that is soon used up (184 MiB) lets a leak be seen that the default would hide.
NUM_KV_BLOCKS = 128
REST_SECONDS = 60.0
# Pollers and pools that tritonserver makes when clients first come; connections are closed by then.
MORE_FILES = 8
# What asking a server raises that has ended.
GONE = (ServerEnded, NoSuchProcess, OSError)


class Run(NamedTuple):
    """What came of it; ``problems`` is empty when all is well."""

    seconds: float
    notes: Notes
    samples: list[Footprint]
    problems: list[str]


def main() -> None:
    args = parse_arguments()
    settings = {
        "model": str(DEFAULT_MODEL),
        "num_kv_blocks": NUM_KV_BLOCKS,
        **parse_assignments(args.set),
    }
    with trial_server(settings, log=args.log) as server:
        run = soak(server, args.seconds, args.clients)
    found = slopes(run.samples)
    problems = run.problems + [
        f"{s.name} grows by {s.per_hour / MIB:.1f} +- {s.error / MIB:.1f} MiB an hour"
        for s in found
        if not s.is_flat
    ]
    report(args.out, run, found, problems, args.clients)
    if problems:
        sys.exit("\n".join(problems[:20]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "soak", help="without an ending")
    parser.add_argument("--log", type=Path, help="where to leave what the server prints")
    parser.add_argument("--set", action="append", default=[], help="engine setting, key=value")
    return parser.parse_args()


def soak(server: TrialServer, seconds: float, num_clients: int) -> Run:
    """Let the clients run for so long, and sample meanwhile."""
    expected = canary(server)
    notes, samples = Notes(), []
    start = time.monotonic()
    before = measure(server, start)
    clients = [Client(server, notes, start, seed) for seed in range(num_clients)]
    for client in clients:
        client.start()
    problems = []
    while (left := start + seconds - time.monotonic()) > 0:
        time.sleep(min(left, max(0.5, seconds / SAMPLES)))
        try:
            samples.append(measure(server, start))
        except GONE as error:
            problems.append(f"after {time.monotonic() - start:.0f} s: {error!r}")
            break
        if not any(client.is_alive() for client in clients):
            problems.append("all clients ended")
            break
    for client in clients:
        client.stopped.set()
    for client in clients:
        client.join(REST_SECONDS)
    if any(client.is_alive() for client in clients):
        problems.append("a client hangs")
    try:
        if (answer := canary(server)) != expected:
            problems.append(f"the canary says {answer!r} instead of {expected!r}")
        problems += left_open(server, start, before)
    except GONE as error:
        problems.append(f"at the end: {error!r}")
    return Run(seconds, notes, samples, problems + notes.problems)


def left_open(server: TrialServer, start: float, before: Footprint) -> list[str]:
    """What does not come back when all clients have gone."""
    deadline = time.monotonic() + REST_SECONDS
    while problems := _left(measure(server, start), before):
        if time.monotonic() > deadline:
            return problems
        time.sleep(0.5)
    return []


def _left(rest: Footprint, before: Footprint) -> list[str]:
    problems = []
    if rest.open_requests or rest.blocks_used:
        problems.append(f"left: {rest.open_requests} requests, {rest.blocks_used} KV blocks")
    if rest.files > before.files + MORE_FILES:
        problems.append(f"{rest.files} files and sockets are open, {before.files} at the start")
    return problems


def report(path: Path, run: Run, found: list[Slope], problems: list[str], num_clients: int) -> None:
    ends = Counter((note.kind, note.end) for note in run.notes.requests)
    slow = latencies(run.notes.requests, run.seconds)
    lines = [
        f"{len(run.notes.requests)} requests of {num_clients} clients at once in "
        f"{run.seconds:.0f} s. "
        + ("; ".join(problems[:20]) or "Nothing grew, nothing went wrong."),
        "",
        *table(
            ["memory", "MiB", "MiB an hour", "+-", "growth in the run, MiB", "flat"],
            [
                (s.name, s.level / MIB, s.per_hour / MIB, s.error / MIB, s.growth / MIB, s.is_flat)
                for s in found
            ],
        ),
        "",
        *table(
            ["kind", "ended", "first chunk, s: early", "late", "whole, s: early", "late"],
            [tuple(row) for row in slow],
        ),
        "",
        *table(["kind", "end", "requests"], [(*key, n) for key, n in sorted(ends.items())]),
        "",
        f"![memory and latency]({path.name}.png)",
    ]
    facts = about(seconds=run.seconds, clients=num_clients)
    data = {
        "slopes": [s._asdict() for s in found],
        "latencies": [row._asdict() for row in slow],
        "samples": [sample._asdict() for sample in run.samples],
        "problems": problems,
    }
    plot(path.with_suffix(".png"), run.samples, run.notes.requests)
    save(path, "A long run with clients of all kinds", facts, data, lines)


if __name__ == "__main__":
    main()
