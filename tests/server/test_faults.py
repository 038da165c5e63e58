"""Bad clients on a real server with a small pool: who behaves gets the right text, nothing leaks.

CHAIRLIFT_FAULT_ROUNDS sets how many rounds of random faults run (200 for a thorough look).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from chairlift_client.control import ControlDir, process_is_alive
from chairlift_client.health import ask
from chairlift_client.models import prepare_default_model
from chairlift_client.scrape import Interval, Scrape
from chairlift_client.server_files import find_server
from chairlift_client.settings import ServeSettings
from chairlift_client.triton_process import TritonProcess
from tests.server.chaos import (
    PROMPTS,
    Chaos,
    Prompt,
    Tally,
    solo_texts,
    texts_of,
    watched_counters,
)
from tests.server.harness import ROOT, ServerProcess, free_ports, running_server, wait_for
from tests.server.scrapes import settled
from tests.server.talk import canary, generate, heartbeat, joined, stream, wait_drained

ROUNDS = int(os.environ.get("CHAIRLIFT_FAULT_ROUNDS", "6"))
SUCCESS = "vllm:request_success_total"
SEATS = 8


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A pool of 160 tokens for 8 seats and optimistic admission, so that preemptions happen.

    float32, because texts must be equal although a preempted request is computed anew in other
    shapes than before.
    """
    with running_server(
        tmp_path_factory.mktemp("small"),
        "--no-greet",
        *("--set", "dtype=float32"),
        *("--set", "num_kv_blocks=11"),
        *("--set", "block_size=16"),
        *("--set", "kv_reserve_fraction=0"),
        *("--set", f"max_num_seqs={SEATS}"),
        env={"CHAIRLIFT_FAULT_INJECTION": "1"},
    ) as server:
        yield server


@pytest.fixture(scope="module")
def texts(small: ServerProcess) -> dict[Prompt, str]:
    return solo_texts(small)


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on the small server: the canary is as before, and every block is back."""
    if "small" not in request.fixturenames:
        yield
        return
    server: ServerProcess = request.getfixturevalue("small")
    before, pid = canary(server), server.stub_pid()
    yield
    wait_drained(server, 20.0)
    assert canary(server) == before
    assert server.stub_pid() == pid, "the supervisor had to restart the server"


def test_K5_H3_random_disconnects_cancels_and_retries(
    small: ServerProcess, texts: dict[Prompt, str]
) -> None:
    before, tally = settled(small, 20.0), Tally()
    chaos = Chaos(small, texts, tally)
    with watched_counters(small):
        for seed in range(ROUNDS):
            chaos.round(seed)
            assert not tally.wrong, f"round {seed}: {tally.wrong}"
    growth = Interval(before, settled(small, 20.0)).growth
    assert growth(SUCCESS) == tally.sent, "a request ended never, or twice"
    assert growth("chairlift:requests_refused_total") == 0
    assert tally.checked > ROUNDS
    assert growth("vllm:num_preemptions_total") > 0, "the pool was not small enough for this test"
    assert growth("vllm:request_success_total", finished_reason="abort") > 0


def test_overload_at_ten_times_capacity_loses_nobody(small: ServerProcess) -> None:
    short = [Prompt(prompt.text, 8) for prompt in PROMPTS[:4]]
    expected = dict(zip(short, texts_of(small, short), strict=True))
    before = settled(small, 20.0)
    crowd = short * (10 * SEATS // len(short))
    began = time.monotonic()
    with ThreadPoolExecutor(len(crowd)) as pool:
        replies = list(pool.map(lambda p: generate(small, **p.body()), crowd))
    seconds = time.monotonic() - began
    assert [reply.status for reply in replies] == [200] * len(crowd)
    assert [reply.text for reply in replies] == [expected[prompt] for prompt in crowd]
    growth = Interval(before, settled(small, 20.0)).growth
    assert growth(SUCCESS) == len(crowd)
    assert growth("vllm:request_queue_time_seconds_sum") < len(crowd) * seconds


def test_slow_readers_hold_nobody_up(small: ServerProcess, texts: dict[Prompt, str]) -> None:
    """Four clients take one event and then nothing, until four others have all of their text."""
    slow = [stream(small, **prompt.body()) for prompt in PROMPTS[:4]]
    first = [next(events)["text_output"] for events in slow]
    assert texts_of(small, PROMPTS[4:8]) == [texts[prompt] for prompt in PROMPTS[4:8]]
    wait_drained(small, 20.0)
    rest = [joined(events) for events in slow]
    found = [a + b for a, b in zip(first, rest, strict=True)]
    assert found == [texts[prompt] for prompt in PROMPTS[:4]]


class Footprint:
    """What the server's two processes hold: resident bytes, open files, shared memory."""

    def __init__(self, server: ServerProcess) -> None:
        processes = [psutil.Process(server.stub_pid()), psutil.Process(server.tritonserver_pid())]
        self.resident = sum(process.memory_info().rss for process in processes)
        self.files = sum(process.num_fds() for process in processes)
        regions = Path("/dev/shm").glob(f"chairlift-{server.process.pid}-*")
        self.shared = sum(region.stat().st_blocks * 512 for region in regions)


def test_H5_streams_leave_no_memory_files_or_shared_memory_behind(small: ServerProcess) -> None:
    body = {"text_input": "Count: 1 2 3", "max_tokens": 4, "ignore_eos": True}

    def streams(number: int) -> Footprint:
        with ThreadPoolExecutor(SEATS) as pool:
            answers = list(pool.map(lambda _: joined(stream(small, **body)), range(number)))
        assert answers == [answers[0]] * number and answers[0]
        wait_drained(small)
        return Footprint(small)

    warm = streams(40)
    after = streams(20 * ROUNDS)
    assert after.shared == warm.shared
    assert after.files <= warm.files + 4
    assert after.resident < warm.resident * 1.02 + (4 << 20)


# ---------------------------------------------------------------- loading and unloading


class Bare:
    """tritonserver without a supervisor and with model control, as an operator of many models."""

    def __init__(self, folder: Path) -> None:
        http, grpc, metrics = free_ports(3)
        self.http_port = http
        self.http, self.metrics_url = f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}"
        self.control = ControlDir(folder)
        self.lines: list[str] = []
        settings = ServeSettings(
            repository=ROOT / "model_repository",
            http_port=http,
            grpc_port=grpc,
            metrics_port=metrics,
            engine={"model": str(prepare_default_model(ROOT / "models", Console()))},
            open_admin=True,
            server_args=("--model-control-mode=explicit",),
        )
        self.process = TritonProcess(settings, find_server(os.environ), folder, self.lines.append)

    def post(self, verb: str) -> int:
        return ask(self.http, f"/v2/repository/models/llm/{verb}", 300.0, {}).status

    def scrape(self) -> Scrape:
        return Scrape(ask(self.metrics_url, "/metrics", 5.0).body, time.monotonic(), "llm")


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Bare]:
    server = Bare(tmp_path)
    try:
        yield server
    finally:
        server.process.terminate()
        wait_for("tritonserver to end", lambda: server.process.exit_code() is not None, 40.0)
        server.process.destroy()


def test_H4_H6_loading_and_unloading_again_and_again(bare: Bare) -> None:
    """Streams in the middle of an unload get their text; the next load answers, and counts on."""
    server: ServerProcess = bare  # type: ignore[assignment]
    answers, counted = set(), 0.0
    for _ in range(max(2, ROUNDS // 40)):
        wait_for("the server", lambda: _answers(lambda: bare.post("load") == 200), 120.0)
        answers.add(canary(server))
        beat = bare.control.heartbeat()
        assert beat is not None
        with ThreadPoolExecutor(4) as pool:
            # So long that the first still runs when the batcher hands over the last, 0.5 s later.
            body = {"text_input": "Count: 1 2 3", "max_tokens": 300, "ignore_eos": True}
            streams = [pool.submit(joined, stream(server, **body)) for _ in range(4)]
            wait_for("four streams", lambda: heartbeat(server)["running"] == 4, 30.0)
            assert bare.post("unload") == 200
            assert len({future.result(timeout=60) for future in streams}) == 1
        wait_for("the stub to end", lambda: not process_is_alive(beat.pid), 30.0)  # noqa: B023
        counted += 5
        assert bare.scrape().value(SUCCESS) == counted, "a model loaded again counts anew, or not"
    assert len(answers) == 1


def _answers(probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except OSError:
        return False
