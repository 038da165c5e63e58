"""The conversation between perf/compare.py and the process that holds one engine.

Runs in the peer's own environment, so the standard library only. The script starts a driver with
`--model DIR --threads N --options JSON`. The driver loads its engine and says one JSON object per
line on standard output: first {"ready": {versions}}, then for each line {"requests": [...]} that it
reads {"answers": [...]} or {"error": text}. What libraries print goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO


class Request(NamedTuple):
    """A prompt, and how many tokens to generate whatever they are."""

    prompt_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """When tokens came (seconds since the run's start), how many each time, and which: their ids,
    or their text from a server."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def add(self, time_s: float, token_ids: Sequence[int]) -> None:
        self.times.append(time_s)
        self.counts.append(len(token_ids))
        self.token_ids += token_ids


class Settings(NamedTuple):
    """What the script asked for."""

    model: Path
    threads: int
    options: dict[str, Any]


class Clock(Protocol):
    """Seconds since the run started."""

    def __call__(self) -> float: ...


class PeerEngine(Protocol):
    """One engine, loaded. All requests of a run are handed over at once."""

    def versions(self) -> dict[str, str]: ...

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]: ...


def package_versions(*names: str) -> dict[str, str]:
    """Versions of installed packages."""
    return {name: metadata.version(name) for name in names}


def serve(make_engine: Callable[[Settings], PeerEngine]) -> None:
    """Load, say so, and answer until standard input ends."""
    replies = _take_over_stdout()
    settings = _settings()
    engine = make_engine(settings)
    _say(replies, {"ready": engine.versions()})
    for line in sys.stdin:
        requests = [Request(*each) for each in json.loads(line)["requests"]]
        try:
            _say(replies, _run(engine, requests))
        except Exception:
            _say(replies, {"error": traceback.format_exc()})


def _run(engine: PeerEngine, requests: list[Request]) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    answers = engine.run(requests, lambda: time.perf_counter() - start)
    return {
        "answers": [[a.times, a.counts, a.token_ids, a.text] for a in answers],
        "driver_cpu_seconds": time.process_time() - cpu,
    }


def _take_over_stdout() -> TextIO:
    """Keep standard output for replies; anybody else's prints land in the log."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return replies


def _settings() -> Settings:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    return Settings(args.model, args.threads, args.options)


def _say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
