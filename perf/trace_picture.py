#!/usr/bin/env python3
"""A recorded trace as a picture: `python perf/trace_picture.py [trace.json]` -> docs/trace.png.

Without a file it records one: workload A arrives at random (Poisson) while two prompts of 1,500
tokens come between. `chairlift trace` records one of a running server.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from measuring.own_engine import OwnEngine, find_engine_package
from measuring.paths import DEFAULT_MODEL, ROOT
from measuring.workload import fresh, load_workload

Event = dict[str, Any]

REQUESTS_PER_SECOND = 16.0
LONG_PROMPTS = {16: 0, 40: 1}  # before this request of A comes this one of D
STEPS_KEPT = 10_000
COLOURS = {"decode": "#1565c0", "prefill": "#ef6c00", "cached": "#cfd8dc", "waiting": "#c62828"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "trace.png")
    args = parser.parse_args()
    trace = json.loads(args.trace.read_text()) if args.trace else record()
    draw(trace["traceEvents"], args.out)
    print(args.out)


def record() -> dict[str, Any]:
    """The trace of an engine under a mixed load."""
    find_engine_package()
    from chairlift.trace import TraceRecorder

    recorder = TraceRecorder(STEPS_KEPT)
    engine = OwnEngine({"model": str(DEFAULT_MODEL)}, on_step=recorder.record)
    engine.run(fresh(load_workload("A"), 1)[:8])  # warms up
    recorder.start()
    arrivals, long = random.Random(0), fresh(load_workload("D"), 2)
    for number, request in enumerate(fresh(load_workload("A"), 2)):
        if number in LONG_PROMPTS:
            engine.submit([long[LONG_PROMPTS[number]]])
        engine.submit([request])
        time.sleep(arrivals.expovariate(REQUESTS_PER_SECOND))
    engine.wait()
    engine.close()
    exported: dict[str, Any] = recorder.export()
    return exported


def draw(events: list[Event], out: Path) -> None:
    """Steps and their times, the tokens of each, who runs and waits, and blocks, over time."""
    figure, axes = plt.subplots(4, 1, figsize=(10, 7), sharex=True)
    _steps(axes[0], events)
    _counter(axes[1], events, "tokens per step", ("decode", "prefill"))
    _counter(axes[2], events, "requests", ("running", "waiting"))
    _counter(axes[3], events, "KV blocks", ("used", "cached"))
    axes[3].set_xlabel("seconds")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _steps(axes: Axes, events: list[Event]) -> None:
    """A bar per step, as wide as it took and as high as its milliseconds."""
    for event in events:
        if event["ph"] != "X" or "args" not in event:
            continue
        kind = "prefill" if event["args"]["prefill tokens"] else "decode"
        width = event["dur"] / 1e6
        axes.bar(event["ts"] / 1e6, event["dur"] / 1e3, width, align="edge", color=COLOURS[kind])
    axes.set_ylabel("ms per step")


def _counter(axes: Axes, events: list[Event], name: str, parts: tuple[str, str]) -> None:
    samples = [event for event in events if event["ph"] == "C" and event["name"] == name]
    times = [event["ts"] / 1e6 for event in samples]
    values = [[event["args"][part] for event in samples] for part in parts]
    colours = [COLOURS.get(part, COLOURS["decode"]) for part in parts]
    axes.stackplot(times, *values, labels=parts, colors=colours, step="post")
    axes.set_ylabel(name)
    axes.legend(loc="upper right", fontsize=8)


if __name__ == "__main__":
    main()
