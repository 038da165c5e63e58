"""A bad day on a real server: faults in steps, killed processes, drain; nothing hangs or is lost.

One server with faults on order serves all tests here; each leaves it serving, and the canary's
answer and the block count are as before.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.harness import ServerProcess, running_server, wait_for
from tests.server.talk import canary, generate, heartbeat, stream, wait_drained

LONG = {"text_input": "Tell me a long story.", "max_tokens": 3000, "ignore_eos": True}
RECOVERY_SECONDS = 60.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(
        tmp_path_factory.mktemp("faulty"),
        "--no-greet",
        *("--set", "num_kv_blocks=800"),
        env={"CHAIRLIFT_FAULT_INJECTION": "1"},
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def as_before(faulty: ServerProcess) -> Iterator[None]:
    before = canary(faulty)
    yield
    wait_drained(faulty, 20.0)
    assert canary(faulty) == before


def order_fault(server: ServerProcess, kind: str, count: int = 1) -> None:
    partial = server.control.path / "fault.new"
    partial.write_text(f"{kind} {count}")
    partial.replace(server.control.path / "fault")


def outcome(server: ServerProcess, body: dict[str, Any]) -> str:
    """How a streamed request ended: "done", its error, or "connection" if that broke."""
    reason = "None"
    try:
        for event in stream(server, return_finish_reason=True, **body):
            if "error" in event:
                return str(event["error"])
            reason = event["finish_reason"]
    except (OSError, ValueError):
        return "connection"
    return "done" if reason != "None" else "connection"


def start_streams(
    server: ServerProcess, pool: ThreadPoolExecutor, count: int, **body: Any
) -> list[Future[str]]:
    futures = [pool.submit(outcome, server, {**LONG, **body}) for _ in range(count)]
    wait_for("the streams to run", lambda: heartbeat(server)["running"] >= count, 30)
    return futures


def test_exception_in_a_step_ends_its_requests_alone(faulty: ServerProcess) -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = start_streams(faulty, pool, 3)
        order_fault(faulty, "raise")
        errors = [future.result(timeout=30) for future in futures]
    assert all("injected fault" in error for error in errors), errors
    assert heartbeat(faulty)["state"] == "serving"


def test_out_of_memory_in_a_step_costs_nobody_an_answer(faulty: ServerProcess) -> None:
    expected = generate(faulty, text_input="One two three", max_tokens=24, temperature=0.0).text
    order_fault(faulty, "oom", 2)
    with ThreadPoolExecutor(6) as pool:
        body = {"text_input": "One two three", "max_tokens": 24, "temperature": 0.0}
        replies = list(pool.map(lambda _: generate(faulty, **body).text, range(6)))
    assert replies == [expected] * 6


def test_A6_invalid_logits_end_one_request_with_an_error(faulty: ServerProcess) -> None:
    with ThreadPoolExecutor(2) as pool:
        futures = start_streams(faulty, pool, 2, max_tokens=300)
        order_fault(faulty, "nan")
        ends = sorted(future.result(timeout=60) for future in futures)
    assert ends[0] == "done"
    assert "NaN" in ends[1]


def test_H1_engine_that_gave_up_is_restarted(faulty: ServerProcess) -> None:
    """Three failing steps in a row: open requests get errors at once, the supervisor restarts."""
    old_stub = faulty.stub_pid()
    order_fault(faulty, "raise", 3)
    for _ in range(3):
        reply = generate(faulty, text_input="x", max_tokens=4)
        assert reply.status != 200
        if "unhealthy" in str(reply.body):
            break
    wait_for("a new stub", lambda: is_back(faulty, old_stub), RECOVERY_SECONDS)


@pytest.mark.parametrize("victim", ["stub", "server"])
def test_H1_killed_under_load_is_back_and_nobody_hangs(faulty: ServerProcess, victim: str) -> None:
    old_stub = faulty.stub_pid()
    with ThreadPoolExecutor(4) as pool:
        futures = start_streams(faulty, pool, 4)
        os.kill(old_stub if victim == "stub" else faulty.tritonserver_pid(), signal.SIGKILL)
        ends = [future.result(timeout=RECOVERY_SECONDS) for future in futures]
    assert "done" not in ends
    wait_for("a new stub", lambda: is_back(faulty, old_stub), RECOVERY_SECONDS)


def is_back(server: ServerProcess, old_stub: int) -> bool:
    beat = server.control.heartbeat()
    if beat is None or beat.pid == old_stub or beat.state != "serving":
        return False
    try:
        return generate(server, text_input="x", max_tokens=1).status == 200
    except (OSError, ValueError):
        return False


def test_H7_drain_under_load(faulty: ServerProcess, start_server) -> None:
    """SIGTERM: short requests finish, long ones and newcomers end with UNAVAILABLE, exit code 0."""
    server = start_server("--no-greet", "--drain-timeout", "4")
    with ThreadPoolExecutor(8) as pool:
        long = start_streams(server, pool, 3)
        short = start_streams(server, pool, 4 - 3, max_tokens=8)
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        wait_for("draining", lambda: heartbeat(server)["state"] != "serving", 5)
        late = pool.submit(outcome, server, LONG)
        assert short[0].result(timeout=30) == "done"
        assert all("shutting down" in f.result(timeout=30) for f in long)
        assert late.result(timeout=30) != "done"
    assert server.process.wait(30) == 0, server.log()[-3000:]
    assert time.monotonic() - began < 40
    assert not [name for name in os.listdir("/dev/shm") if f"-{server.process.pid}-" in name]


def test_X1_streams_closed_early_leave_the_server_up(faulty: ServerProcess) -> None:
    server_pid = faulty.tritonserver_pid()
    for _ in range(20):
        events = stream(faulty, **{**LONG, "max_tokens": 400})
        next(events)
        events.close()
    wait_drained(faulty, 10.0)
    assert faulty.tritonserver_pid() == server_pid


def test_X2_a_whole_answer_is_bounded_though_nobody_waits_for_it(faulty: ServerProcess) -> None:
    """tritonserver does not see an HTTP client of /generate go; a timeout parameter bounds it."""
    gone = threading.Thread(
        target=lambda: generate(
            faulty, **{**LONG, "text_input": "x"}, parameters={"timeout": 1_500_000}
        )
    )
    gone.start()
    wait_for("the request to run", lambda: heartbeat(faulty)["running"] == 1)
    wait_drained(faulty, 10.0)
    gone.join()


def test_X5_request_timeout_holds_while_running(faulty: ServerProcess) -> None:
    reply = generate(faulty, **LONG, parameters={"timeout": 700_000})
    assert reply.status in (400, 503)
    assert "Request timeout expired" in reply.body["error"]


@pytest.mark.parametrize("extra", [{}, {"return_logprobs": True}, {"num_return_sequences": 2}])
def test_X6_cancel_after_a_few_tokens_of_any_kind(
    faulty: ServerProcess, extra: dict[str, Any]
) -> None:
    for count in (1, 2, 3):
        events = stream(faulty, **{**LONG, **extra}, stop_words=["zzz", "qqq"])
        for _ in range(count):
            next(events)
        events.close()
    wait_drained(faulty, 10.0)
