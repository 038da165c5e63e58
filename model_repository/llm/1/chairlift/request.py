"""What a client asked for (immutable) and where the engine is with it (mutable)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends; already checked and in canonical form.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs`` is
    the number of alternatives to report beside the chosen token, ``None`` for no report at all.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class FinishReason(Enum):
    """Why a sequence ended; the value is the word that clients see."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, before penalties and temperature.

    ``chosen`` and ``rank`` (1 is the most likely) belong to the token that was drawn; ``top`` holds
    (token id, log-probability), most likely first.
    """

    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the engine.

    ``num_computed`` tokens have their KV in the cache; a step raises it towards ``num_tokens``
    (prompt and output so far), so that prefill, chunked prefill, decode, and resuming after a
    preemption are one case. ``n > 1`` is one request until its prompt is computed, then n of them.
    With one step ahead ``num_tokens`` counts a token that the step in flight draws, which
    ``token_ids`` doesn't hold yet. Positions below ``num_granted`` may be written without asking
    the KV manager; ``num_overtaken`` counts the requests that boarded before this one because it
    did not fit.
    """

    uid: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    arrival: float
    eos_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    sample_index: int = 0
    group: int = -1
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    batch_id: int = 0

    status: Status = Status.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    first_scheduled: float | None = None
    slot: int = -1
    num_overtaken: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_granted: int = 0
    prefix_chain: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    max_total_tokens: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.num_tokens = len(self.token_ids)
        self.max_total_tokens = len(self.prompt_ids) + self.params.max_tokens
        if self.group < 0:
            self.group = self.uid

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def append_output(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.token_ids.append(token_id)
        self.num_tokens += 1
