"""The conversation with a peer's process, with engines that need no model."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perf.measuring.paths import PEERS
from perf.measuring.peer_process import PeerFailed, PeerProcess
from perf.measuring.workload import WorkRequest

REQUESTS = [WorkRequest([1, 2, 3], 2), WorkRequest([4], 3)]
START_SECONDS = 60.0

Start = Callable[[str], PeerProcess]

PRELUDE = """
from driver import Answer, serve

class Engine:
    def versions(self):
        return {"fake": "1"}

    def run(self, requests, clock):
        print("noise from a library")
        answers = [Answer() for _ in requests]
        for request, answer in zip(requests, answers):
            for token in range(request.max_tokens):
                answer.add(clock(), [token])
        return answers
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a driver whose engine is changed by the lines given."""
    started: list[PeerProcess] = []

    def starter(lines: str = "") -> PeerProcess:
        program = tmp_path / "peer.py"
        program.write_text(f"{PRELUDE}\n{textwrap.dedent(lines)}\nserve(lambda settings: Engine())")
        command = [sys.executable, str(program), "--model", "none", "--threads", "1"]
        environment = {**os.environ, "PYTHONPATH": str(PEERS)}
        peer = PeerProcess(command, {}, environment, tmp_path / "peer.log", START_SECONDS)
        started.append(peer)
        return peer

    yield starter
    for peer in started:
        peer.close()


def test_a_run_brings_times_tokens_and_what_it_took(start: Start) -> None:
    peer = start("")
    assert peer.versions == {"fake": "1"}
    for _ in range(2):
        run = peer.run(REQUESTS, START_SECONDS)
        assert run.token_ids == [[0, 1], [0, 1, 2]]
        assert [trace.num_prompt_tokens for trace in run.traces] == [3, 1]
        assert [trace.num_tokens for trace in run.traces] == [2, 3]
        assert all(gap >= 0 for trace in run.traces for gap in trace.gaps)
        assert run.peak_rss_bytes > 2**20
        assert run.cpu >= 0


def test_a_wrong_number_of_tokens_is_a_failure(start: Start) -> None:
    peer = start(
        """
        class Engine(Engine):
            def run(self, requests, clock):
                answers = super().run(requests, clock)
                answers[1].add(clock(), [7])
                return answers
        """
    )
    with pytest.raises(PeerFailed, match="request 1: 4 tokens instead of 3"):
        peer.run(REQUESTS, START_SECONDS)


def test_an_engine_s_error_is_told_and_the_next_run_works(start: Start) -> None:
    peer = start(
        """
        class Engine(Engine):
            broken = True

            def run(self, requests, clock):
                if self.broken:
                    self.broken = False
                    raise ValueError("out of something")
                return super().run(requests, clock)
        """
    )
    with pytest.raises(PeerFailed, match="out of something"):
        peer.run(REQUESTS, START_SECONDS)
    assert len(peer.run(REQUESTS, START_SECONDS).traces) == 2


def test_a_process_that_dies_says_what_it_printed_last(start: Start) -> None:
    peer = start(
        """
        import os, sys

        class Engine(Engine):
            def run(self, requests, clock):
                print("the library gave up", file=sys.stderr, flush=True)
                os._exit(3)
        """
    )
    with pytest.raises(PeerFailed, match="the library gave up"):
        peer.run(REQUESTS, START_SECONDS)


def test_an_engine_that_cannot_be_loaded_says_why(start: Start) -> None:
    with pytest.raises(PeerFailed, match="no such library"):
        start("raise ImportError('no such library')")
