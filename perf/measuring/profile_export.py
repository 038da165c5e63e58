"""perf_analyzer's profile export -> traces, from which the usual figures follow.

The export has, per request, the time it was sent and the time of each response, in nanoseconds, and
what each response held. A response counts as many tokens as its `num_output_tokens` says, else one;
one that is empty, as a final one without data is, counts none.
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
    outputs: Sequence[Mapping[str, Any]] = request.get("response_outputs") or [{}] * len(times)
    trace = Trace(request["timestamp"] / 1e9)
    for time_ns, output in zip(times, outputs, strict=True):
        tokens = _num_tokens(output)
        if tokens:
            trace.arrivals.append(Arrival(time_ns / 1e9, tokens))
    if not trace.arrivals:
        trace.error = "no response with data"
    return trace


def _num_tokens(output: Mapping[str, Any]) -> int:
    reported = output.get("num_output_tokens")
    if reported is not None:
        return int(reported[0] if isinstance(reported, list) else reported)
    return 1 if output.get("text_output", "text") not in ("", None) else 0
