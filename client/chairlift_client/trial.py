"""A server for the length of a measurement: started through `chairlift serve`, stopped after."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from chairlift_client.errors import SetupError
from chairlift_client.health import is_ready
from chairlift_client.stream import Endpoint

POLL_SECONDS = 0.2
STOP_SECONDS = 30.0
LOG_TAIL = 2000


class TrialServer(NamedTuple):
    """A ready server and the supervisor's process id, which is the root of its process tree."""

    grpc: Endpoint
    http_url: str
    metrics_url: str
    pid: int


def free_ports(number: int) -> list[int]:
    """Ports on which nobody listens at the moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


@contextmanager
def trial_server(
    settings: Mapping[str, object],
    *,
    batching: str = "continuous",
    triton_queue: bool = False,
    model: str | None = None,
    model_repository: Path | None = None,
    load_timeout: float = 600.0,
    log: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[TrialServer]:
    """Run a server with these engine settings on free ports of this machine.

    ``log`` is where to leave what it prints, which is else thrown away in the end. Raises
    SetupError with the end of its log when it does not start.
    """
    http, grpc, metrics = free_ports(3)
    command = [
        *(sys.executable, "-m", "chairlift_client", "serve", "--no-greet"),
        *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
        *("--batching", batching),
        *(("--triton-queue",) if triton_queue else ()),
        *(("--model", model) if model else ()),
        *(("--model-repository", str(model_repository)) if model_repository else ()),
    ]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    with tempfile.TemporaryDirectory(prefix="chairlift-trial-") as folder:
        log_path = log or Path(folder) / "server.log"
        with log_path.open("w") as stream:
            process = subprocess.Popen(
                command,
                env={**os.environ, "CHAIRLIFT_CONTROL_DIR": f"{folder}/control"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        try:
            url = f"http://127.0.0.1:{http}"
            deadline = clock() + load_timeout
            while not is_ready(url, "llm"):
                if process.poll() is not None or clock() > deadline:
                    raise SetupError(f"the server did not start:\n{_tail(log_path)}")
                wait(POLL_SECONDS)
            yield TrialServer(
                Endpoint("grpc", "127.0.0.1", grpc),
                url,
                f"http://127.0.0.1:{metrics}",
                process.pid,
            )
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """A second signal ends the drain at once: nothing that still runs is wanted any more."""
    for number in (signal.SIGTERM, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    process.kill()
    process.wait()


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-LOG_TAIL:]
