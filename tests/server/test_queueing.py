"""Under pressure on a real server: refuse at once, time out, overtake by priority, share fairly."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from tests.server.grpc_talk import tensors
from tests.server.harness import ROOT, ServerProcess, running_server, wait_for
from tests.server.talk import Reply, generate, heartbeat, stream, wait_drained

BUSY = {"text_input": "Tell me a story.", "max_tokens": 300, "ignore_eos": True}
SHORT = {"text_input": "Count: 1 2", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def fair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One seat, and an engine that sees the whole queue."""
    settings = ("queue_order=fair", "max_num_seqs=1", "max_waiting=8")
    with running_server(
        tmp_path_factory.mktemp("fair"), "--no-greet", *[a for s in settings for a in ("--set", s)]
    ) as server:
        yield server


@pytest.fixture(scope="module")
def prioritised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One seat, a waiting room of ten, and a Triton queue of four behind it."""
    repository = tmp_path_factory.mktemp("repository")
    for name in ("llm", "llm_infer", "vllm_model"):
        shutil.copytree(ROOT / "model_repository" / name, repository / name)
    config = repository / "llm" / "configs" / "triton_queue.pbtxt"
    small = config.read_text().replace("max_queue_size: 1024", "max_queue_size: 4")
    config.write_text(small.replace("max_batch_size: 8", "max_batch_size: 1"))
    settings = ("queue_order=priority", "max_num_seqs=1", "max_waiting=10")
    with running_server(
        tmp_path_factory.mktemp("prioritised"),
        *("--no-greet", "--triton-queue", "--model-repository", str(repository)),
        *[a for s in settings for a in ("--set", s)],
    ) as server:
        yield server


class Occupied:
    """Holds a seat, which may be the server's only one, until told to let go."""

    def __init__(self, server: ServerProcess) -> None:
        self.events = stream(server, **{**BUSY, "max_tokens": 4000})
        next(self.events)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        self.events.close()


def in_background(
    pool: ThreadPoolExecutor, server: ServerProcess, finished: list[str], name: str, **body: Any
) -> Any:
    """Send a request and note its name when it is answered."""

    def run() -> Reply:
        reply = generate(server, **{**SHORT, **body})
        finished.append(name)
        return reply

    return pool.submit(run)


def waiting(server: ServerProcess, count: int) -> None:
    wait_for(f"{count} requests to wait", lambda: heartbeat(server)["waiting"] == count)


def test_F7_beyond_the_room_is_refused_at_once(fair: ServerProcess) -> None:
    with ThreadPoolExecutor(30) as pool:
        finished: list[str] = []
        with Occupied(fair):
            queued = [in_background(pool, fair, finished, "queued") for _ in range(8)]
            waiting(fair, 8)
            began = time.monotonic()
            refused = list(pool.map(lambda _: generate(fair, **SHORT), range(20)))
            took = time.monotonic() - began
            assert not finished, "somebody passed a full seat"
        replies = [future.result(timeout=60) for future in queued]
    assert [reply.status for reply in replies] == [200] * 8
    assert all("max_waiting is 8" in reply.body["error"] for reply in refused)
    assert took < 30, "refusals waited for the seat"
    wait_drained(fair)


def test_a_greedy_tenant_does_not_starve_another(fair: ServerProcess) -> None:
    """Six requests of one tenant wait; the first of another comes last and is served second."""
    finished: list[str] = []
    with ThreadPoolExecutor(8) as pool, Occupied(fair):
        for index in range(6):
            in_background(pool, fair, finished, f"greedy {index}", tenant="greedy")
            waiting(fair, index + 1)
        in_background(pool, fair, finished, "modest", tenant="modest")
        waiting(fair, 7)
    assert len(finished) == 7
    assert finished.index("modest") <= 1, finished
    wait_drained(fair)


def test_F4_high_priority_overtakes(prioritised: ServerProcess) -> None:
    """1 is the highest, as in Triton."""
    finished: list[str] = []
    with ThreadPoolExecutor(8) as pool, Occupied(prioritised):
        for index in range(4):
            in_background(pool, prioritised, finished, f"low {index}", llm_priority=8)
            waiting(prioritised, index + 1)
        in_background(pool, prioritised, finished, "high", llm_priority=1)
        waiting(prioritised, 5)
    assert finished[0] == "high", finished
    wait_drained(prioritised)


def test_X5_times_out_while_it_waits(prioritised: ServerProcess) -> None:
    with Occupied(prioritised):
        reply = generate(prioritised, **SHORT, parameters={"timeout": 300_000})
    assert reply.status in (400, 503)
    assert "timeout expired" in reply.body["error"].lower()
    wait_drained(prioritised)


def test_X4_cancelled_while_it_waits(prioritised: ServerProcess) -> None:
    """It leaves the queue at once, though the seat stays taken."""
    got: list[Any] = []
    address = f"127.0.0.1:{prioritised.grpc_port}"
    with Occupied(prioritised), grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: got.append(error or result))
        inputs = tensors(grpcclient, batched=True, text_input="Count: 1 2", stream=True)
        client.async_stream_infer("llm", inputs)
        waiting(prioritised, 1)
        client.stop_stream(cancel_requests=True)
        waiting(prioritised, 0)
        assert heartbeat(prioritised)["running"] == 1
    assert [str(each.status()) for each in got] == ["StatusCode.CANCELLED"]
    wait_drained(prioritised)


def test_F7_tritons_own_queue_size_acts(prioritised: ServerProcess) -> None:
    """Forty at once: what neither the engine's room nor Triton's queue of four takes is refused."""
    with ThreadPoolExecutor(40) as pool, Occupied(prioritised):
        futures = [pool.submit(generate, prioritised, **SHORT) for _ in range(40)]

        def enough_refused() -> bool:
            return sum(f.done() for f in futures) >= 40 - 17  # 10 + 4 + blocked call + prepared

        wait_for("the refusals", enough_refused, 30)
    replies = [future.result() for future in futures]
    refused = [reply for reply in replies if reply.status != 200]
    assert all("Exceeds maximum queue size" in reply.body["error"] for reply in refused)
    assert 4 <= len(replies) - len(refused) <= 17
    wait_drained(prioritised)


def test_F8_streams_overlap(server: ServerProcess) -> None:
    """On a server with seats, the second stream speaks while the first does."""
    with Occupied(server), Occupied(server):
        wait_for("both to run", lambda: heartbeat(server)["running"] == 2)
    wait_drained(server)
