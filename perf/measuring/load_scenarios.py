"""perf_analyzer's runs as data: scenarios, their input files, and their command lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .paths import PERF
from .workload import WorkRequest

SCENARIOS = PERF / "load" / "scenarios.json"
# A response is awaited for as long as Triton's own queue policy lets a request live.
ALWAYS = ("-i", "grpc", "--streaming", "--async", "--stability-percentage", "999")


class Level(NamedTuple):
    """One run of perf_analyzer: what it is called in tables, its pace, and how many requests."""

    name: str
    arguments: tuple[str, ...]
    num_requests: int


class Scenario(NamedTuple):
    """One kind of load; see perf/load/scenarios.json."""

    name: str
    about: str
    workload: str
    stream: bool
    levels: tuple[Level, ...]


def load_scenarios(folder: Path, path: Path = SCENARIOS) -> dict[str, Scenario]:
    """All scenarios; files that their pace needs are written into ``folder``."""
    return {
        name: _scenario(name, spec, folder) for name, spec in json.loads(path.read_text()).items()
    }


def _scenario(name: str, spec: Mapping[str, Any], folder: Path) -> Scenario:
    fewest = int(spec["min_requests"])
    if "burst" in spec:
        intervals = folder / f"{name}-intervals.txt"
        size, pause = spec["burst"]["size"], spec["burst"]["pause_seconds"]
        intervals.write_text(burst_intervals(size, pause))
        pace = ("--request-intervals", str(intervals))
        levels = [Level(f"{size} every {pause:g} s", pace, fewest)]
    else:
        option, extra = spec["levels"]["option"], tuple(spec.get("arguments", ()))
        per_level = spec.get("requests_per_level", 0)
        unit = "/s" if "rate" in option else " at a time"
        levels = [
            Level(
                f"{value}{unit}", (option, str(value), *extra), max(fewest, int(per_level * value))
            )
            for value in spec["levels"]["values"]
        ]
    stream = bool(spec.get("stream", True))
    return Scenario(name, spec["about"], spec["workload"], stream, tuple(levels))


def burst_intervals(size: int, pause_seconds: float) -> str:
    """Microseconds between requests, one per line: a burst's requests follow at once."""
    return "\n".join(["1"] * (size - 1) + [str(int(pause_seconds * 1e6))]) + "\n"


def input_json(requests: Sequence[WorkRequest], *, stream: bool) -> str:
    """perf_analyzer's input file: token ids, greedy, and counts to check its own against."""
    data = [
        {
            "input_ids": {"content": list(request.prompt_ids), "shape": [len(request.prompt_ids)]},
            "max_tokens": [request.max_tokens],
            "temperature": [0.0],
            "stream": [stream],
            "return_num_output_tokens": [True],
        }
        for request in requests
    ]
    return json.dumps({"data": data})


def command(
    program: Path, address: str, model: str, inputs: Path, level: Level, export: Path
) -> list[str]:
    """One run: gRPC streams, a fixed number of requests, the export with every response's time."""
    return [
        *(str(program), "-m", model, "-u", address, *ALWAYS),
        *("--input-data", str(inputs), "--request-parameter", "ignore_eos:true:bool"),
        *("--request-count", str(level.num_requests), "--profile-export-file", str(export)),
        *level.arguments,
    ]
