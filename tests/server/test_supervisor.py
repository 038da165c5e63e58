"""The supervisor with a real tritonserver and a model that only counts words."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chairlift_client.control import process_is_alive
from chairlift_client.errors import GenerateError
from chairlift_client.probe import Target, check
from chairlift_client.stream import generate
from tests.server.harness import TOY_REPOSITORY, ServerProcess, wait_for

StartServer = Callable[..., ServerProcess]
BACK_WITHIN = 10.0


class Client(threading.Thread):
    """A stream in the background that remembers what it got and how it ended."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._stream: Iterator[str] = generate(url, "count", max_tokens=tokens, timeout=60.0)
        self.pieces: list[str] = []
        self.error: GenerateError | None = None
        self.start()

    def run(self) -> None:
        try:
            for piece in self._stream:
                self.pieces.append(piece)
        except GenerateError as error:
            self.error = error

    def ended(self) -> None:
        self.join(30.0)
        assert not self.is_alive(), "the stream hangs"


def shared_memory(supervisor: int) -> list[Path]:
    return list(Path("/dev/shm").glob(f"chairlift-{supervisor}-*"))


def answers(server: ServerProcess) -> bool:
    try:
        return "".join(generate(server.grpc, "count", max_tokens=3, timeout=5.0)) != ""
    except GenerateError:
        return False


@pytest.mark.parametrize("victim", ["stub", "tritonserver"])
def test_killed_process_is_back_within_seconds(start_toy: StartServer, victim: str) -> None:
    server = start_toy("--set", "token_seconds=0.05")
    first = server.tritonserver_pid()
    client = Client(server.grpc, tokens=1000)
    wait_for("the first words", lambda: client.pieces)

    killed = time.monotonic()
    os.kill(server.stub_pid() if victim == "stub" else first, signal.SIGKILL)
    client.ended()
    assert client.error is not None
    wait_for("an answer", lambda: answers(server), BACK_WITHIN)
    assert time.monotonic() - killed < BACK_WITHIN

    assert server.tritonserver_pid() != first
    reason = "the stub process" if victim == "stub" else "tritonserver ended"
    assert reason in server.log() and "restarting in" in server.log()
    assert server.stop() == 0
    assert not shared_memory(server.process.pid)


@pytest.mark.parametrize("setting", ["freeze_on", "break_on"])
def test_engine_that_stops_or_breaks_is_replaced(start_toy: StartServer, setting: str) -> None:
    server = start_toy("--set", f"{setting}=poison", "--heartbeat-timeout", "2")
    first = server.tritonserver_pid()
    assert "".join(generate(server.grpc, "poison", max_tokens=2)) == "word0 word1 "
    wait_for("a restart", lambda: "restarting in" in server.log(), BACK_WITHIN)
    wait_for("an answer", lambda: answers(server), BACK_WITHIN)
    assert server.tritonserver_pid() != first
    expected = {"freeze_on": "no heartbeat from the engine", "break_on": "it is unhealthy"}
    assert expected[setting] in server.log()


def test_sigterm_lets_running_requests_finish(start_toy: StartServer) -> None:
    server = start_toy("--set", "token_seconds=0.05")
    client = Client(server.grpc, tokens=40)
    wait_for("the first words", lambda: client.pieces)
    pids = [server.tritonserver_pid(), server.stub_pid()]

    server.signal(signal.SIGTERM)
    draining = wait_for("the drain", lambda: _state(server) == "draining")
    assert draining
    late = Client(server.grpc, tokens=2)
    late.ended()
    assert late.error is not None and "draining" in str(late.error)

    client.ended()
    assert client.error is None and len(client.pieces) == 40
    assert server.process.wait(20) == 0
    assert not any(process_is_alive(pid) for pid in pids)
    assert not shared_memory(server.process.pid)


def test_drain_ends_at_its_limit(start_toy: StartServer) -> None:
    server = start_toy("--set", "token_seconds=0.1", "--drain-timeout", "1")
    client = Client(server.grpc, tokens=100_000)
    wait_for("the first words", lambda: client.pieces)
    assert server.stop(60) == 0
    client.ended()
    assert client.error is not None and "drain limit" in str(client.error)


def test_second_signal_hurries(start_toy: StartServer) -> None:
    server = start_toy("--set", "token_seconds=0.1", "--drain-timeout", "600")
    client = Client(server.grpc, tokens=100_000)
    wait_for("the first words", lambda: client.pieces)
    server.signal(signal.SIGINT)
    wait_for("the drain", lambda: _state(server) == "draining")
    server.signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    client.ended()


def test_server_ends_with_a_killed_supervisor(start_toy: StartServer) -> None:
    server = start_toy()
    pids = [server.tritonserver_pid(), server.stub_pid()]
    server.process.kill()
    server.process.wait()
    wait_for("its processes to end", lambda: not any(map(process_is_alive, pids)), 30.0)


def test_two_servers_live_side_by_side(start_toy: StartServer) -> None:
    one, two = start_toy(), start_toy()
    assert answers(one) and answers(two)
    assert one.stop() == 0
    assert answers(two)


def test_the_model_may_have_another_name(start_server: StartServer, tmp_path: Path) -> None:
    """As clients of TensorRT-LLM's repositories expect it."""
    shutil.copytree(TOY_REPOSITORY / "llm", tmp_path / "ensemble")
    config = tmp_path / "ensemble" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "llm"', 'name: "ensemble"'))
    options = ("--model-repository", str(tmp_path), "--model", "toy")
    server = start_server(*options, "--model-name", "ensemble")
    assert "".join(generate(server.grpc, "count", model="ensemble", max_tokens=2)) != ""


def test_closing_a_stream_cancels_the_request(start_toy: StartServer) -> None:
    server = start_toy("--set", "token_seconds=0.05")
    for count, url in enumerate((server.grpc, server.http), start=1):
        stream = generate(url, "count", max_tokens=100_000)
        assert next(stream) == "word0 "
        stream.close()  # type: ignore[attr-defined]
        wait_for("the cancellation", lambda c=count: cancelled(server) == str(c))


def test_taken_port_is_one_clear_error(start_toy: StartServer) -> None:
    server = start_toy()
    command = [sys.executable, "-m", "chairlift_client", "serve", *server.arguments]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    output = (second.stdout + second.stderr).strip()
    assert output.count("\n") == 0 and "--http-port" in output and "taken" in output


def test_model_that_cannot_load_ends_the_supervisor(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path, ["--model-repository", str(tmp_path), "--model", "toy"], {})
    assert server.process.wait(60) == 1
    assert "the server did not start" in server.log()


def test_probes_of_a_living_server(start_toy: StartServer) -> None:
    server = start_toy()
    target = Target(server.http, "llm", timeout=5.0, heartbeat_timeout=30.0)
    env = {"CHAIRLIFT_CONTROL_DIR": str(server.control.path)}
    assert [check(kind, target, env) for kind in ("startup", "readiness", "liveness")] == [None] * 3
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        os.kill(server.stub_pid(), signal.SIGKILL)
        wait_for("the liveness probe to fail", lambda: check("liveness", target, env))
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def cancelled(server: ServerProcess) -> str:
    return "".join(generate(server.grpc, "cancelled?", timeout=10.0))


def _state(server: ServerProcess) -> str | None:
    heartbeat = server.control.heartbeat()
    return heartbeat.state if heartbeat else None
