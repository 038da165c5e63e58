"""What leaves the engine after each step: plain tuples, no tensors, no shared objects."""

from __future__ import annotations

from typing import NamedTuple

from .errors import ErrorCode
from .request import FinishReason, TokenLogprobs


class TokenOut(NamedTuple):
    """A new token of one sequence; an end token, whose text isn't shown, is not ``visible``."""

    group: int
    sample_index: int
    token_id: int
    visible: bool
    logprobs: TokenLogprobs | None
    finish: FinishReason | None


class PromptOut(NamedTuple):
    """A prompt chunk was computed; times in seconds of the engine's clock."""

    group: int
    num_cached: int
    first_scheduled: float
    logprobs: list[TokenLogprobs]


class ErrorOut(NamedTuple):
    """The whole request ends with this error."""

    group: int
    code: ErrorCode
    message: str


Outputs = list[TokenOut | PromptOut | ErrorOut]


class StepStats(NamedTuple):
    """What one step did, for metrics and the trace. Times in seconds of the engine's clock.

    ``num_recomputed_tokens``: those of its prefill tokens that a preemption had thrown away.
    """

    started: float
    scheduled: float
    finished: float
    num_decodes: int
    num_prefills: int
    num_prefill_tokens: int
    num_recomputed_tokens: int
    num_running: int
    num_waiting: int
    num_preempted: int
    blocks_used: int
    blocks_cached_free: int
