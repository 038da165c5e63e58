"""perf_analyzer's profile export -> traces, from which the usual figures follow.

The export has, per request, the time it was sent and the time of each response, in nanoseconds, and
what each response held. perf_analyzer fills in outputs that were not sent with whatever lay in
memory, so `num_output_tokens` is believed only where the request asked for it; else a response with
text is one token. A final response without data counts none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift_client.timings import Arrival, Trace


def read_export(path: Path) -> list[Trace]:
    """All requests of all experiments in the file. Raises ValueError where there is none: a tool
    that recorded nothing must not look like a server that answered nothing."""
    export = json.loads(path.read_text())
    traces = [
        _trace(request)
        for experiment in export.get("experiments", ())
        for request in experiment.get("requests", ())
    ]
    if not traces:
        raise ValueError(f"{path.name}: no request was recorded")
    return traces


def _trace(request: Mapping[str, Any]) -> Trace:
    times = request["response_timestamps"]
    outputs: Sequence[Mapping[str, Any]] = request["response_outputs"]
    counted = bool(request.get("request_inputs", {}).get("return_num_output_tokens"))
    trace = Trace(request["timestamp"] / 1e9)
    for time_ns, output in zip(times, outputs, strict=True):
        tokens = _num_tokens(output, counted)
        if tokens:
            trace.arrivals.append(Arrival(time_ns / 1e9, tokens))
    if not trace.arrivals:
        trace.error = "no response with data"
    return trace


def _num_tokens(output: Mapping[str, Any], counted: bool) -> int:
    if counted:
        return int(output.get("num_output_tokens", 0))
    return 1 if output.get("text_output") else 0
