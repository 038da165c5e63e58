"""The output thread: one FINAL whatever comes, coalescing, stop strings, rows of one request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from chairlift.answers import Answer, ClientRequest
from chairlift.calls import GenerateCall, OutputOptions, TextPrompt, WireSettings
from chairlift.errors import ErrorCode, RequestError
from chairlift.output import OutputThread
from chairlift.request import FinishReason, Request, SamplingParams
from chairlift.step_outputs import ErrorOut, TokenOut
from chairlift.token_pieces import TokenPieces

GROUPS = count(0, 16)


class Recorder:
    """A responder that keeps what was sent and fails the test on anything after FINAL."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.finals = 0
        self.closed = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
        self.gate.wait(10)
        self._sent(final)
        self.texts.append(outputs["text_output"].ravel()[0].decode())

    def fail(self, error: RequestError, *, final: bool) -> None:
        self._sent(final)
        self.errors.append(error.message)

    def is_cancelled(self) -> bool:
        return False

    def _sent(self, final: bool) -> None:
        assert not self.finals, "sent after FINAL"
        self.finals += final
        if final:
            self.closed.set()


class Stopper:
    def __init__(self) -> None:
        self.stopped: list[tuple[int, int]] = []
        self.aborted: list[int] = []

    def abort_sequence(self, group: int, sample_index: int) -> None:
        self.stopped.append((group, sample_index))

    def abort(self, group: int, error: RequestError | None = None) -> None:
        self.aborted.append(group)


@pytest.fixture(scope="module")
def pieces() -> TokenPieces:
    """One token per byte-level letter, so that ids are easy to write."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenPieces(tokenizer)


class Unobserved:
    def on_token(self, answer: Answer, sample_index: int, now: float) -> None: ...

    def on_overrun(self) -> None: ...

    def on_ended(self, answer: Answer, code: ErrorCode | None) -> None: ...


class Bench:
    """An output thread with a fake engine."""

    def __init__(
        self, pieces: TokenPieces, clock: Callable[[], float] | None = None, share: float = 1.0
    ) -> None:
        self.pieces = pieces
        self.engine = Stopper()
        self.closed: list[Answer] = []
        ticks = count()
        clock = clock or (lambda: float(next(ticks)))
        self.thread = OutputThread(clock, Unobserved(), self.closed.append)
        self.thread.start(self.engine, share)

    def open(
        self, client: ClientRequest, *, stream: bool = True, stop: tuple[str, ...] = (), n: int = 1
    ) -> int:
        params = SamplingParams(max_tokens=99, stop=stop, n=n)
        request = Request(next(GROUPS), [0, 1], params, seed=0, arrival=0.0)
        options = OutputOptions(stream=stream)
        call = GenerateCall("", TextPrompt("ab"), params, options)
        answer = Answer(client, call, request, self.pieces, WireSettings(), "", int, 16)
        client.open_rows += 1
        self.thread.open(answer)
        return request.group

    def say(
        self, group: int, text: str, finish: FinishReason | None = None, index: int = 0
    ) -> None:
        last = len(text) - 1
        for i, letter in enumerate(text):
            ends = finish if i == last else None
            self.thread.put([TokenOut(group, index, ord(letter) - 97, True, None, ends)])


@pytest.fixture
def bench(pieces: TokenPieces):
    made = Bench(pieces)
    yield made
    made.thread.stop()


def new_client() -> tuple[Recorder, ClientRequest]:
    recorder = Recorder()
    return recorder, ClientRequest(recorder, "id", None)


@pytest.mark.parametrize("stream", [True, False])
def test_final_comes_once_with_the_last_text(bench: Bench, stream: bool) -> None:
    recorder, client = new_client()
    group = bench.open(client, stream=stream)
    bench.say(group, "hello", FinishReason.LENGTH)
    assert recorder.closed.wait(10)
    bench.say(group, "more")
    bench.thread.put([ErrorOut(group, ErrorCode.CANCELLED, "too late")])
    bench.thread.stop()
    assert "".join(recorder.texts) == "hello"
    assert recorder.finals == 1 and not recorder.errors
    assert len(recorder.texts) == 1 or stream
    assert bench.closed[0].record.finish_reasons == ["length"]


def test_sends_beyond_their_share_of_the_time_are_put_together(pieces: TokenPieces) -> None:
    """A clock that a send moves on by 1 s: with a share of 0.01 the rest never ends on its own."""
    now = [0.0]

    class Slow(Recorder):
        def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
            super().send(outputs, final=final)
            now[0] += 1.0
            begun.set()

    begun = threading.Event()
    bench = Bench(pieces, clock=lambda: now[0], share=0.01)
    recorder, other = Slow(), Slow()
    group = bench.open(ClientRequest(recorder, "id", None))
    bench.say(group, "a")
    assert begun.wait(10), "the first token goes at once"
    bench.say(group, "bcdef")
    late = bench.open(ClientRequest(other, "id", None))
    bench.say(late, "z", FinishReason.STOP)
    assert other.closed.wait(10), "first tokens and ends don't wait"
    assert recorder.texts == ["a"], "the rest is kept"
    bench.say(group, "g", FinishReason.STOP)
    assert recorder.closed.wait(10)
    assert "".join(recorder.texts) == "abcdefg" and recorder.finals == 1
    bench.thread.stop()


def test_slow_sender_coalesces_and_the_first_token_goes_at_once(bench: Bench) -> None:
    recorder, client = new_client()
    recorder.gate.clear()
    group = bench.open(client)
    bench.say(group, "abcdefghij", FinishReason.STOP)
    recorder.gate.set()
    assert recorder.closed.wait(10)
    assert "".join(recorder.texts) == "abcdefghij"
    assert len(recorder.texts) <= 2


def test_stop_string_ends_the_sequence_and_tells_the_engine(bench: Bench) -> None:
    recorder, client = new_client()
    group = bench.open(client, stop=("lo",))
    bench.say(group, "helloxyz")
    assert recorder.closed.wait(10)
    bench.thread.stop()
    assert "".join(recorder.texts) == "hel"
    assert bench.engine.stopped == [(group, 0)]


def test_error_between_a_stop_and_its_response_sends_nothing_twice(bench: Bench) -> None:
    recorder, client = new_client()
    group = bench.open(client, stop=("c",))
    stop = TokenOut(group, 0, 2, True, None, None)
    bench.thread.put([stop, ErrorOut(group, ErrorCode.INTERNAL, "step failed")])
    assert recorder.closed.wait(10)
    bench.thread.stop()
    assert recorder.finals == 1 and not recorder.errors


def test_rows_of_one_request_share_one_final(bench: Bench) -> None:
    recorder, client = new_client()
    first, second = bench.open(client), bench.open(client)
    bench.say(first, "ab", FinishReason.STOP)
    bench.thread.put([ErrorOut(second, ErrorCode.UNAVAILABLE, "gone")])
    assert recorder.closed.wait(10)
    bench.thread.stop()
    assert recorder.errors == ["gone"] and recorder.finals == 1


def test_all_samples_end_before_final(bench: Bench) -> None:
    recorder, client = new_client()
    group = bench.open(client, n=3)
    for index, text in enumerate(("aa", "b", "cccc")):
        bench.say(group, text, FinishReason.LENGTH, index)
    assert recorder.closed.wait(10)
    bench.thread.stop()
    assert sorted("".join(recorder.texts)) == sorted("aabcccc")
    assert sorted(bench.closed[0].record.finish_reasons) == ["length"] * 3


def test_a_responder_that_raises_ends_its_request_alone(bench: Bench) -> None:
    broken, broken_client = new_client()
    broken.send = None  # type: ignore[assignment, method-assign]
    healthy, client = new_client()
    bad, good = bench.open(broken_client), bench.open(client)
    bench.say(bad, "x")
    bench.say(good, "fine", FinishReason.STOP)
    assert healthy.closed.wait(10)
    bench.thread.stop()
    assert bench.engine.aborted == [bad]
    assert "".join(healthy.texts) == "fine"
