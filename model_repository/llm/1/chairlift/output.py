"""The output thread: tokens -> text -> responses. All sends happen here, and only here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol

from .answers import Answer
from .errors import ErrorCode, RequestError
from .step_outputs import ErrorOut, Outputs, PromptOut, TokenOut

logger = logging.getLogger(__name__)


class Stopper(Protocol):
    """The part of the engine that this thread needs."""

    def abort_sequence(self, group: int, sample_index: int) -> None: ...

    def abort(self, group: int, error: RequestError | None = None) -> None: ...


class Observer(Protocol):
    """Told, in this thread, of what the metrics count."""

    def on_token(self, answer: Answer, sample_index: int, now: float) -> None: ...

    def on_overrun(self) -> None: ...

    def on_ended(self, answer: Answer, code: ErrorCode | None) -> None: ...


class OutputThread:
    """Drains the engine's messages. While a send takes its time messages gather, and what gathered
    for one sequence goes out as one chunk: a slow sender coalesces, and the engine never waits.

    Sending takes ``share`` of the time at most, ends and first tokens excepted, which go at once.
    Where the model runs on the same cores every send costs it more than the send's own time: each
    passes through half a dozen threads, and whichever takes a core holds up all of a step's.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        observer: Observer,
        on_closed: Callable[[Answer], None],
    ) -> None:
        self._clock = clock
        self._observer = observer
        self._on_closed = on_closed
        self._queue: SimpleQueue[Answer | Outputs | None] = SimpleQueue()
        self._open: dict[int, Answer] = {}
        self._engine: Stopper | None = None
        self._rest = 0.0  # seconds without sends per second of sending
        self._thread = threading.Thread(target=self._run, name="chairlift-output", daemon=True)

    def start(self, engine: Stopper, share: float = 1.0) -> None:
        self._engine = engine
        self._rest = 1.0 / share - 1.0
        self._thread.start()

    def open(self, answer: Answer) -> None:
        """Announce a request; must come before the engine hears of it."""
        self._queue.put(answer)

    def put(self, outputs: Outputs) -> None:
        """One step's outputs; never blocks."""
        self._queue.put(outputs)

    def stop(self) -> None:
        """Send what is queued, then end the thread and wait for it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        running = True
        touched: dict[int, Answer] = {}
        resume = self._clock()
        while running:
            running = self._gather(touched, resume)
            started = self._clock()
            rested = started >= resume or not running
            due = [answer for answer in touched.values() if rested or answer.urgent]
            for answer in due:
                touched.pop(answer.group, None)
                self._respond(answer)
            if rested and due:
                finished = self._clock()
                resume = finished + (finished - started) * self._rest

    def _gather(self, touched: dict[int, Answer], resume: float) -> bool:
        """Take what has come, or wait for it; with something to send, until ``resume`` only."""
        try:
            left = max(0.0, resume - self._clock()) if touched else None
            running = self._take(self._queue.get(timeout=left), touched)
            while running:
                running = self._take(self._queue.get_nowait(), touched)
        except Empty:
            return True
        return running

    def _take(self, message: Answer | Outputs | None, touched: dict[int, Answer]) -> bool:
        if message is None:
            return False
        if isinstance(message, Answer):
            self._open[message.group] = message
            return True
        now = self._clock()
        for out in message:
            answer = self._open.get(out.group)
            if answer is None:
                if isinstance(out, TokenOut):
                    self._observer.on_overrun()
                continue
            try:
                self._apply(out, answer, now, touched)
            except Exception as error:
                logger.exception("request %d: its output could not be made", out.group)
                self._end(answer, RequestError(f"output failed: {error}", ErrorCode.INTERNAL))
        return True

    def _apply(
        self,
        out: TokenOut | PromptOut | ErrorOut,
        answer: Answer,
        now: float,
        touched: dict[int, Answer],
    ) -> None:
        assert self._engine is not None
        if isinstance(out, TokenOut):
            before = answer.record.num_output_tokens
            if answer.on_token(out, now):
                self._engine.abort_sequence(out.group, out.sample_index)
            if answer.record.num_output_tokens > before:
                self._observer.on_token(answer, out.sample_index, now)
            else:
                self._observer.on_overrun()
            touched[out.group] = answer
        elif isinstance(out, PromptOut):
            answer.on_prompt(out)
        else:
            touched.pop(out.group, None)
            self._flush(answer)
            if out.group in self._open:  # else a stop string had just completed its last sequence
                self._end(answer, answer.call.error(RequestError(out.message, out.code)))

    def _respond(self, answer: Answer) -> None:
        if answer.group not in self._open:
            return
        try:
            self._flush(answer)
        except Exception as error:
            logger.exception("request %d: a response could not be sent", answer.group)
            assert self._engine is not None
            self._engine.abort(answer.group)
            self._end(answer, RequestError(f"sending failed: {error}", ErrorCode.INTERNAL))

    def _flush(self, answer: Answer) -> None:
        """Send what is due; the last response of the client's last row carries FINAL."""
        client = answer.client
        last = None
        for outputs in answer.responses():
            if last is not None:
                client.responder.send(last, final=False)
            last = outputs
        if last is None:
            return
        closing = answer.ended and client.open_rows == 1
        client.responder.send(last, final=closing)
        if answer.ended:
            self._close(answer)

    def _end(self, answer: Answer, error: RequestError) -> None:
        answer.record.error = error.message
        try:
            answer.client.responder.fail(error, final=answer.client.open_rows == 1)
        except Exception:
            logger.exception("request %d: its error could not be sent", answer.group)
        self._close(answer, error.code)

    def _close(self, answer: Answer, code: ErrorCode | None = None) -> None:
        if self._open.pop(answer.group, None) is None:
            return
        answer.client.open_rows -= 1
        self._observer.on_ended(answer, code)
        self._on_closed(answer)
