"""Clients of every kind, one request after the other, each noted with its latency and its end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from chairlift_client.errors import GenerateError
from chairlift_client.health import ask
from chairlift_client.stream import stream_chunks
from chairlift_client.trial import TrialServer

CANARY = {"text_input": "The quick brown fox", "max_tokens": 12, "temperature": 0.0}
WORDS = ["lift", "snow", "valley", "wire", "cabin", "storm", "ticket", "bench", "summit", "guide"]
SHARED = "You run a small mountain railway and answer briefly and politely. " * 12


class Note(NamedTuple):
    """One request: seconds since the start, seconds to its first chunk and in all, how it ended."""

    at: float
    kind: str
    first: float | None
    total: float
    end: str


@dataclass
class Notes:
    """What all clients noted; ``problems`` are ends that must not happen."""

    requests: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, note: Note, problem: str | None) -> None:
        with self.lock:
            self.requests.append(note)
            if problem is not None:
                self.problems.append(f"{note.kind} at {note.at:.0f} s: {problem}")


class Kind(NamedTuple):
    """A sort of request: its inputs, after how many chunks its client goes, which end it expects.

    ``expects`` is part of the error that must come, ``may`` are parts of errors that may.
    """

    name: str
    protocol: str
    inputs: Callable[[random.Random], Mapping[str, Any]]
    leaves_after: Callable[[random.Random], int] | None = None
    expects: str | None = None
    may: tuple[str, ...] = ()


def _text(rng: random.Random, most: int = 60) -> str:
    return "Write about " + " ".join(rng.choices(WORDS, k=rng.randint(3, most)))


def _sized(rng: random.Random, **more: Any) -> dict[str, Any]:
    return {"prompt": _text(rng), "max_tokens": rng.randint(4, 48), **more}


def _messages(rng: random.Random) -> dict[str, Any]:
    turns = [{"role": "system", "content": SHARED}, {"role": "user", "content": _text(rng)}]
    return {"messages": turns, "max_tokens": rng.randint(4, 32)}


def _few(rng: random.Random) -> int:
    return rng.randint(1, 12)


_TIME_LIMITS = ("no answer within", "deadline exceeded")
_LONG = {"max_tokens": 400, "ignore_eos": True}
KINDS = (
    Kind("grpc", "grpc", _sized),
    Kind("http", "http", _sized),
    Kind("chat", "grpc", _messages),
    Kind("shared", "http", lambda rng: _sized(rng, prompt=SHARED + _text(rng, 8))),
    Kind("sampled", "grpc", lambda rng: _sized(rng, temperature=0.9, top_p=0.9, top_k=40)),
    Kind("two", "grpc", lambda rng: _sized(rng, num_return_sequences=2, temperature=1.0)),
    Kind("logprobs", "http", lambda rng: _sized(rng, return_logprobs=True)),
    Kind("stop", "grpc", lambda rng: _sized(rng, stop_words=["e", "the"])),
    Kind("penalties", "http", lambda rng: _sized(rng, repetition_penalty=1.2)),
    Kind("tenant", "grpc", lambda rng: _sized(rng, tenant=f"t{rng.randint(0, 99)}")),
    Kind("cancels", "grpc", lambda rng: _sized(rng, **_LONG), leaves_after=_few),
    Kind("goes away", "http", lambda rng: _sized(rng, **_LONG), leaves_after=_few),
    Kind("impatient", "grpc", lambda rng: _sized(rng, timeout=0.3, **_LONG), may=_TIME_LIMITS),
    Kind("refused", "http", lambda rng: _sized(rng, temperature=-1.0), expects="temperature"),
    Kind("too long", "grpc", lambda rng: {"prompt": "word " * 20_000}, expects="prompt"),
)


class Client(threading.Thread):
    """Sends one request after the other until told to stop."""

    def __init__(self, server: TrialServer, notes: Notes, start: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        host, port = server.grpc.host, server.grpc.port
        self._urls = {"http": server.http_url, "grpc": f"grpc://{host}:{port}"}
        self._notes = notes
        self._start_time = start
        self._rng = random.Random(seed)

    def run(self) -> None:
        while not self.stopped.is_set():
            self._send(self._rng.choice(KINDS))

    def _send(self, kind: Kind) -> None:
        began = time.monotonic()
        first, end, problem = None, "left" if kind.leaves_after else "done", None
        limit = kind.leaves_after(self._rng) if kind.leaves_after else None
        try:
            url = self._urls[kind.protocol]
            with closing(stream_chunks(url, **kind.inputs(self._rng))) as chunks:
                for _ in islice(chunks, limit):
                    first = first or time.monotonic() - began
            if kind.expects is not None:
                problem = "was not refused"
        except GenerateError as error:
            end, text = "error", str(error).lower()
            allowed = kind.may if kind.expects is None else (kind.expects,)
            if not any(part in text for part in allowed):
                problem = str(error)
        except Exception as error:
            end, problem = "error", repr(error)
        total = time.monotonic() - began
        self._notes.add(Note(began - self._start_time, kind.name, first, total, end), problem)


def canary(server: TrialServer) -> str:
    """The answer that must stay the same."""
    reply = ask(server.http_url, "/v2/models/llm/generate", 60.0, CANARY)
    return reply.body if reply.status == 200 else f"HTTP {reply.status}: {reply.body}"
