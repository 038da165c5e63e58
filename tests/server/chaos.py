"""Clients that misbehave at random moments, and bystanders who check their texts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from chairlift.metric_names import ALL, Kind
from chairlift_client.errors import GenerateError
from chairlift_client.scrape import Scrape
from chairlift_client.stream import generate as grpc_stream
from tests.server.harness import ServerProcess
from tests.server.talk import generate, joined, stream

INJECTED = "injected fault"
SYSTEM = "You are a patient guide in the mountains, and you answer in short sentences. "


@dataclass(frozen=True, slots=True)
class Prompt:
    """A greedy request; many share a beginning, so their prefixes meet in the cache."""

    text: str
    max_tokens: int

    def body(self) -> dict[str, object]:
        return {
            "text_input": self.text,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }


PROMPTS = [
    Prompt(f"{SYSTEM if i % 2 else ''}Tell me about lift number {i}, please.", 12 + 12 * (i % 4))
    for i in range(8)
]


def solo_texts(server: ServerProcess) -> dict[Prompt, str]:
    """What each prompt gives with nobody else on the server."""
    return {prompt: generate(server, **prompt.body()).text for prompt in PROMPTS}


@dataclass
class Tally:
    """What the clients of a round did; ``sent`` counts the requests that reached the model."""

    sent: int = 0
    checked: int = 0
    poisoned: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_sent(self) -> None:
        with self.lock:
            self.sent += 1

    def check(self, prompt: Prompt, text: str, expected: str) -> None:
        with self.lock:
            self.checked += 1
            if text != expected:
                self.wrong.append(f"{prompt.text!r}: {text!r} instead of {expected!r}")

    def count_poisoned(self) -> None:
        with self.lock:
            self.poisoned += 1


class Chaos:
    """One server's clients; the same seed makes the same round."""

    def __init__(self, server: ServerProcess, texts: dict[Prompt, str], tally: Tally) -> None:
        self._server = server
        self._texts = texts
        self._tally = tally

    def round(self, seed: int) -> None:
        """Clients of all kinds at once; ends when the last of them has."""
        rng = random.Random(seed)
        if rng.random() < 0.5:
            self._poison(rng.choice(["raise 1", "oom 2"]))
        kinds: list[Callable[[random.Random], None]] = [
            *[self._read_longest] * 3,
            self._read_whole,
            self._disconnect,
            self._cancel,
            self._retry,
        ]
        seeds = [random.Random(rng.random()) for _ in kinds]
        with ThreadPoolExecutor(len(kinds)) as pool:
            for done in [pool.submit(k, s) for k, s in zip(kinds, seeds, strict=True)]:
                done.result(timeout=120)
        self._poison(None)

    def _poison(self, order: str | None) -> None:
        path = self._server.control.path / "fault"
        if order is None:
            path.unlink(missing_ok=True)
            return
        partial = path.with_name("fault.new")
        partial.write_text(order)
        partial.replace(path)

    def _start(self, prompt: Prompt) -> Iterator[str]:
        self._tally.count_sent()
        for event in stream(self._server, **prompt.body()):
            if "error" in event:
                raise GenerateError(str(event["error"]))
            yield event["text_output"]

    @contextmanager
    def _may_be_poisoned(self) -> Iterator[None]:
        """A failed step ends its requests with an error that says so; nothing else may."""
        try:
            yield
        except GenerateError as error:
            if INJECTED not in str(error):
                raise
            self._tally.count_poisoned()

    def _read_longest(self, rng: random.Random) -> None:
        """Three of these at once do not fit into the pool, so one of them is preempted."""
        prompt = rng.choice(PROMPTS[3::4])
        with self._may_be_poisoned():
            self._tally.check(prompt, "".join(self._start(prompt)), self._texts[prompt])

    def _read_whole(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        self._tally.count_sent()
        reply = generate(self._server, **prompt.body())
        with self._may_be_poisoned():
            if reply.status != 200:
                raise GenerateError(reply.body["error"])
            self._tally.check(prompt, reply.text, self._texts[prompt])

    def _disconnect(self, rng: random.Random) -> None:
        chunks = self._start(rng.choice(PROMPTS))
        with self._may_be_poisoned():
            list(islice(chunks, rng.randint(1, 8)))
        chunks.close()  # type: ignore[attr-defined]

    def _cancel(self, rng: random.Random) -> None:
        prompt = rng.choice(PROMPTS)
        self._tally.count_sent()
        chunks = grpc_stream(
            self._server.grpc,
            prompt.text,
            max_tokens=prompt.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout=60.0,
        )
        with self._may_be_poisoned():
            list(islice(chunks, rng.randint(1, 8)))
        chunks.close()

    def _retry(self, rng: random.Random) -> None:
        """Close, and ask for the same again at once: its prefix is still being given back."""
        prompt = rng.choice(PROMPTS)
        with self._may_be_poisoned():
            chunks = self._start(prompt)
            list(islice(chunks, rng.randint(1, 8)))
            chunks.close()  # type: ignore[attr-defined]
        with self._may_be_poisoned():
            self._tally.check(prompt, "".join(self._start(prompt)), self._texts[prompt])


@contextmanager
def watched_counters(server: ServerProcess) -> Iterator[None]:
    """Scrape ten times a second meanwhile; a counter that falls or a failed scrape is an error."""
    names = [spec.name for spec in ALL if spec.kind is Kind.COUNTER]
    stop, problems = threading.Event(), []

    def watch() -> None:
        before = dict.fromkeys(names, 0.0)
        while not stop.wait(0.1):
            now = Scrape(server.metrics(), time.monotonic(), "llm")
            for name in names:
                if now.value(name) < before[name]:
                    problems.append(f"{name} fell from {before[name]} to {now.value(name)}")
                before[name] = now.value(name)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            stop.set()
            watching.result(timeout=30)
    assert not problems, problems


def texts_of(server: ServerProcess, prompts: list[Prompt]) -> list[str]:
    """All at once, streamed."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda p: joined(stream(server, **p.body())), prompts))
