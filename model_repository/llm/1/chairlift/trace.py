"""A record of every step that Perfetto (ui.perfetto.dev) or chrome://tracing opens."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .step_outputs import StepStats

logger = logging.getLogger(__name__)

Event = dict[str, Any]

# Rows of the timeline, in the viewers' terms threads of one process.
PROCESS = 1
STEPS, PHASES = 1, 2


class TraceRecorder:
    """Keeps the last ``capacity`` steps while it is on; it can be switched while the engine runs.

    ``record`` is called by the engine's thread, the rest by any: a step is one tuple appended to a
    bounded deque, and an export copies the deque first.
    """

    def __init__(self, capacity: int, *, enabled: bool = False) -> None:
        self.enabled = enabled
        self._steps: deque[StepStats] = deque(maxlen=capacity)

    def record(self, stats: StepStats) -> None:
        if self.enabled:
            self._steps.append(stats)

    def start(self) -> None:
        """Record from now on; what an earlier recording left is dropped."""
        self._steps.clear()
        self.enabled = True

    def stop(self) -> None:
        self.enabled = False

    def __len__(self) -> int:
        return len(self._steps)

    def export(self) -> Event:
        """The trace in the Trace Event Format, times in microseconds since the first step."""
        return trace_events(list(self._steps))

    def write(self, path: Path) -> None:
        """Write the trace, whole or not at all."""
        unfinished = path.with_suffix(path.suffix + ".part")
        unfinished.write_text(json.dumps(self.export(), separators=(",", ":")))
        unfinished.replace(path)


def trace_events(steps: list[StepStats]) -> Event:
    """Steps as slices with what they did, their phases below, and counters over time."""
    events = _names()
    origin = steps[0].started if steps else 0.0
    for stats in steps:
        events += _slices(stats, origin)
        events += _counters(stats, origin)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names() -> list[Event]:
    names = [("process_name", 0, "Chairlift engine")]
    names += [("thread_name", STEPS, "steps"), ("thread_name", PHASES, "schedule and run")]
    return [
        {"ph": "M", "pid": PROCESS, "tid": tid, "name": kind, "args": {"name": name}}
        for kind, tid, name in names
    ]


def _slices(stats: StepStats, origin: float) -> Iterable[Event]:
    """The whole step, named by what it mixes, and under it what the time went into."""
    parts = []
    if stats.num_decodes:
        parts.append(f"{stats.num_decodes} decode")
    if stats.num_prefill_tokens:
        parts.append(f"{stats.num_prefill_tokens} prefill")
    yield _slice(" + ".join(parts), STEPS, stats.started, stats.finished, origin) | {
        "args": {
            "decode rows": stats.num_decodes,
            "prefill rows": stats.num_prefills,
            "prefill tokens": stats.num_prefill_tokens,
            "recomputed tokens": stats.num_recomputed_tokens,
            "preempted": stats.num_preempted,
        }
    }
    yield _slice("schedule", PHASES, stats.started, stats.scheduled, origin)
    yield _slice("run", PHASES, stats.scheduled, stats.finished, origin)
    if stats.num_preempted:
        yield {
            "ph": "i",
            "s": "p",
            "pid": PROCESS,
            "tid": STEPS,
            "name": f"{stats.num_preempted} preempted",
            "ts": _microseconds(stats.scheduled, origin),
        }


def _slice(name: str, tid: int, start: float, end: float, origin: float) -> Event:
    first = _microseconds(start, origin)
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": tid,
        "name": name,
        "ts": first,
        "dur": _microseconds(end, origin) - first,
    }


def _counters(stats: StepStats, origin: float) -> Iterable[Event]:
    values = {
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        "tokens per step": {"decode": stats.num_decodes, "prefill": stats.num_prefill_tokens},
        "KV blocks": {"used": stats.blocks_used, "cached": stats.blocks_cached_free},
    }
    for name, args in values.items():
        yield {
            "ph": "C",
            "pid": PROCESS,
            "name": name,
            "ts": _microseconds(stats.scheduled, origin),
            "args": args,
        }


def _microseconds(moment: float, origin: float) -> float:
    return round((moment - origin) * 1e6, 1)


class TraceOrders:
    """Switches a recorder through the control folder: a file ``trace`` holds ``on`` or ``off``.

    After ``off`` the recording lies beside it as ``trace-<time>.json``, which ``trace-done`` names.
    """

    def __init__(self, recorder: TraceRecorder, control_dir: Path | None) -> None:
        self._recorder = recorder
        self._control_dir = control_dir

    def look(self) -> None:
        """Take an order; called by the housekeeping thread."""
        if self._control_dir is None:
            return
        order = self._control_dir / "trace"
        try:
            wanted = order.read_text().strip()
            order.unlink()
        except FileNotFoundError:
            return
        if wanted == "on":
            self._recorder.start()
        elif wanted == "off":
            self._recorder.stop()
            name = time.strftime("trace-%Y%m%d-%H%M%S.json", time.gmtime())
            self._recorder.write(self._control_dir / name)
            done = self._control_dir / "trace-done.new"
            done.write_text(str(self._control_dir / name))
            done.replace(self._control_dir / "trace-done")
        else:
            logger.warning("%s holds %r; want on or off", order, wanted)
