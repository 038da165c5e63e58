"""One engine's process: started, asked to run workloads, measured from outside, ended."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from chairlift_client.timings import Arrival, Trace

from .processes import cpu_seconds, peak_rss_bytes
from .workload import WorkRequest

STOP_SECONDS = 30.0
LOG_TAIL = 1500


class PeerFailed(Exception):
    """An engine did not start or did not run a workload; the text says why."""


class Run(NamedTuple):
    """One workload on one engine. Processor times in seconds; those of the driver are part of
    ``cpu``. Of token ids and text an engine reports one."""

    traces: list[Trace]
    token_ids: list[list[int]]
    texts: list[str]
    cpu: float
    driver_cpu: float
    peak_rss_bytes: int


class PeerProcess:
    """A driver of perf/peers; see its module `driver` for what is said to and fro."""

    def __init__(
        self,
        command: Sequence[str],
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log_path: Path,
        start_timeout: float,
    ) -> None:
        self._log_path = log_path
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log_path.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--options", json.dumps(dict(options))],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.versions: dict[str, str] = self._reply(start_timeout)["ready"]
        except PeerFailed:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, requests: Sequence[WorkRequest], timeout: float) -> Run:
        """Hand the requests over at once and wait for all answers. Raises PeerFailed, also where an
        engine generated another number of tokens than it was asked for."""
        assert self._process.stdin is not None
        cpu = cpu_seconds(self.pid)
        try:
            self._process.stdin.write(json.dumps({"requests": requests}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerFailed(f"the process is gone: {self._log_tail()}") from error
        reply = self._reply(timeout)
        traces = []
        for request, (times, counts, *_) in zip(requests, reply["answers"], strict=True):
            arrivals = [Arrival(*pair) for pair in zip(times, counts, strict=True)]
            traces.append(Trace(0.0, len(request.prompt_ids), arrivals))
        _check_counts(requests, traces)
        return Run(
            traces,
            [answer[2] for answer in reply["answers"]],
            [answer[3] for answer in reply["answers"]],
            cpu_seconds(self.pid) - cpu,
            reply["driver_cpu_seconds"],
            peak_rss_bytes(self.pid),
        )

    def close(self) -> None:
        """End the driver: its input ends first, so that it can stop what it started."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        for end in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                end()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _reply(self, timeout: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise PeerFailed(f"no answer within {timeout:.0f} s: {self._log_tail()}") from None
        if not line:
            raise PeerFailed(f"the process ended: {self._log_tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(reply["error"][-LOG_TAIL:])
        return reply

    def _log_tail(self) -> str:
        return self._log_path.read_text(errors="replace")[-LOG_TAIL:]


def _check_counts(requests: Sequence[WorkRequest], traces: Sequence[Trace]) -> None:
    for number, (request, trace) in enumerate(zip(requests, traces, strict=True)):
        if trace.num_tokens != request.max_tokens:
            raise PeerFailed(
                f"request {number}: {trace.num_tokens} tokens instead of {request.max_tokens}"
            )
