"""The trace of steps: bounded, switchable while running, and what the viewers accept."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from chairlift.step_outputs import StepStats
from chairlift.trace import TraceRecorder, trace_events


def stats(
    started: float, decodes: int = 3, prefill_tokens: int = 0, preempted: int = 0
) -> StepStats:
    return StepStats(
        started=started,
        scheduled=started + 0.0001,
        finished=started + 0.01,
        num_decodes=decodes,
        num_prefills=int(prefill_tokens > 0),
        num_prefill_tokens=prefill_tokens,
        num_recomputed_tokens=0,
        num_running=5,
        num_waiting=7,
        num_preempted=preempted,
        blocks_used=40,
        blocks_cached_free=11,
    )


def test_it_records_only_while_it_is_on() -> None:
    trace = TraceRecorder(10)
    trace.record(stats(1.0))
    assert len(trace) == 0
    trace.start()
    trace.record(stats(2.0))
    trace.stop()
    trace.record(stats(3.0))
    assert len(trace) == 1
    trace.start()
    assert len(trace) == 0, "a new recording begins empty"


def test_it_is_bounded_and_keeps_the_newest() -> None:
    trace = TraceRecorder(3, enabled=True)
    for moment in range(10):
        trace.record(stats(float(moment)))
    steps = [e for e in trace.export()["traceEvents"] if e["ph"] == "X" and e["tid"] == 1]
    assert [event["ts"] for event in steps] == [0.0, 1e6, 2e6]


def test_events_are_complete_nested_and_in_microseconds() -> None:
    events = trace_events([stats(5.0), stats(5.02, decodes=2, prefill_tokens=64, preempted=1)])
    by_name = {event["name"]: event for event in events["traceEvents"] if event["ph"] == "X"}
    step = by_name["2 decode + 64 prefill"]
    assert (step["ts"], step["dur"]) == (20_000.0, 10_000.0)
    assert step["args"]["prefill tokens"] == 64
    schedule, run = by_name["schedule"], by_name["run"]
    assert schedule["ts"] + schedule["dur"] == run["ts"]
    assert run["ts"] + run["dur"] == step["ts"] + step["dur"]
    counters = [event for event in events["traceEvents"] if event["ph"] == "C"]
    assert [c["args"] for c in counters if c["name"] == "KV blocks"] == [
        {"used": 40, "cached": 11},
        {"used": 40, "cached": 11},
    ]
    instants = [event for event in events["traceEvents"] if event["ph"] == "i"]
    assert [event["name"] for event in instants] == ["1 preempted"]
    named = [event["args"]["name"] for event in events["traceEvents"] if event["ph"] == "M"]
    assert named == ["Chairlift engine", "steps", "schedule and run"]


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    TraceRecorder(5).write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all(event["ph"] == "M" for event in events)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_export_while_another_thread_records() -> None:
    trace = TraceRecorder(100, enabled=True)
    done = threading.Event()

    def record() -> None:
        for moment in range(20_000):
            trace.record(stats(float(moment)))
        done.set()

    thread = threading.Thread(target=record)
    thread.start()
    exports = 0
    while not done.is_set():
        assert json.dumps(trace.export())
        exports += 1
    thread.join()
    assert exports and len(trace) == 100
