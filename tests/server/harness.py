"""Start `chairlift serve` as a user would, on free ports, and wait for what it does."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from chairlift_client.control import ControlDir
from chairlift_client.health import ask

ROOT = Path(__file__).resolve().parents[2]
TOY_REPOSITORY = ROOT / "tests" / "server" / "toy_repository"
START_SECONDS = 300.0

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T], seconds: float = 30.0) -> T:
    """Poll until the probe gives something true, and return that; else fail naming `what`."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.02)
    return found


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on at the moment, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class ServerProcess:
    """A supervisor with its tritonserver, as a child of the test."""

    def __init__(self, folder: Path, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.http = f"http://127.0.0.1:{self.http_port}"
        self.grpc = f"grpc://127.0.0.1:{self.grpc_port}"
        self.control = ControlDir(folder / "control")
        self.log_path = folder / "server.log"
        self.arguments = [
            *("--http-port", str(self.http_port)),
            *("--grpc-port", str(self.grpc_port)),
            *("--metrics-port", str(self.metrics_port)),
            *arguments,
        ]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chairlift_client", "serve", *self.arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT / "client"),
                    "CHAIRLIFT_CONTROL_DIR": str(self.control.path),
                    **env,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def log(self) -> str:
        """Everything the supervisor and the server have printed."""
        return self.log_path.read_text()

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the supervisor knows that the model is ready; fail when it ends before."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended:\n{self.log()[-4000:]}"
            return "\nready http" in self.log() and self.control.heartbeat() is not None

        wait_for("the model to be ready", ready, seconds)
        wait_for("the introduction to end", lambda: "\nchairlift chat" in self.log(), seconds)

    def tritonserver_pid(self) -> int:
        """The process id of the tritonserver that runs now."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def stub_pid(self) -> int:
        """The process id of the stub that wrote the last heartbeat."""
        heartbeat = self.control.heartbeat()
        assert heartbeat is not None, self.log()[-4000:]
        return heartbeat.pid

    def metrics(self) -> str:
        """The text of /metrics."""
        return ask(f"http://127.0.0.1:{self.metrics_port}", "/metrics", 5.0).body

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, and the supervisor's exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def running_server(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready, stopped at the end."""
    server = ServerProcess(folder, arguments, env or {})
    try:
        server.wait_until_ready()
        yield server
    finally:
        try:
            server.stop()
        finally:
            server.process.kill()
            server.process.wait()
