"""What engine, output, and execute threads note down for the metrics: appended, never computed.

One thread appends to each deque and the housekeeping thread takes from its other end, which needs
no lock. Whoever is observed pays an append per token, step, and request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from .answers import Answer, RequestRecord
from .calls import Prompt
from .errors import ErrorCode
from .step_outputs import StepStats

T = TypeVar("T")


class FirstToken(NamedTuple):
    """A request's first token; ``seconds`` from its arrival."""

    seconds: float
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int


class Ended(NamedTuple):
    """A request's end; ``code`` where it was an error, ``at`` on the engine's clock."""

    record: RequestRecord
    prompt: Prompt
    code: ErrorCode | None
    at: float


class Observations:
    """The notes since they were last taken."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps: deque[StepStats] = deque()
        self.gaps: deque[float] = deque()
        self.first_tokens: deque[FirstToken] = deque()
        self.ended: deque[Ended] = deque()
        self.refused: deque[ErrorCode] = deque()
        self.num_tokens = 0
        self.num_overrun = 0
        self._last_token: dict[tuple[int, int], float] = {}

    def on_step(self, stats: StepStats) -> None:
        """In the engine's thread."""
        self.steps.append(stats)

    def on_token(self, answer: Answer, sample_index: int, now: float) -> None:
        """In the output thread: a token that belongs to an answer's text."""
        self.num_tokens += 1
        sequence = (answer.group, sample_index)
        before = self._last_token.get(sequence)
        self._last_token[sequence] = now
        record = answer.record
        if before is not None:
            self.gaps.append(now - before)
        elif record.num_output_tokens == 1:
            self.first_tokens.append(
                FirstToken(
                    now - record.arrival,
                    record.tenant,
                    record.num_prompt_tokens,
                    record.num_cached_tokens,
                )
            )

    def on_overrun(self) -> None:
        """In the output thread: a token that came after its sequence's end."""
        self.num_overrun += 1

    def on_ended(self, answer: Answer, code: ErrorCode | None) -> None:
        """In the output thread: the last response has been sent."""
        for sequence in answer.sequences:
            self._last_token.pop((answer.group, sequence.sample_index), None)
        self.ended.append(Ended(answer.record, answer.call.prompt, code, self._clock()))

    def on_refused(self, code: ErrorCode) -> None:
        """In the execute thread: a request was answered with an error at once."""
        self.refused.append(code)


def taken(notes: deque[T]) -> list[T]:
    """Take all that is there; what is appended meanwhile is left for the next time."""
    return [notes.popleft() for _ in range(len(notes))]
