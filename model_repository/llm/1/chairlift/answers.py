"""One open request between the engine's tokens and the client's responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .calls import GenerateCall, WireSettings
from .detokenizer import Detokenizer
from .errors import RequestError
from .request import FinishReason, Request, TokenLogprobs
from .responses import RequestFacts, SequenceDelta, encode
from .step_outputs import PromptOut, TokenOut
from .tensors import Array
from .token_pieces import TokenPieces


class Responder(Protocol):
    """The way back to one client. After ``final`` nothing more may be sent."""

    def send(self, outputs: Mapping[str, Array], *, final: bool) -> None: ...

    def fail(self, error: RequestError, *, final: bool) -> None: ...

    def is_cancelled(self) -> bool: ...


class Settled(Protocol):
    """How times leave the engine: seconds of its clock -> nanoseconds since the epoch."""

    def __call__(self, seconds: float) -> int: ...


@dataclass(slots=True, eq=False)
class ClientRequest:
    """One request of Triton's: B rows share its responder, and the last to end closes it.

    ``asked_at`` is when Triton was last asked whether it was cancelled, at first its arrival.
    """

    responder: Responder
    request_id: str
    deadline: float | None
    asked_at: float = 0.0
    groups: list[int] = field(default_factory=list)
    open_rows: int = 0
    cancelled: bool = False


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request when it has ended; times in seconds of the engine's clock."""

    request_id: str
    group: int
    tenant: str
    num_prompt_tokens: int
    num_samples: int
    max_tokens: int
    arrival: float
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None


class Sequence:
    """One of a request's n answers: its text so far, and what has not been sent of it."""

    def __init__(self, sample_index: int, detokenizer: Detokenizer) -> None:
        self.sample_index = sample_index
        self.finish: FinishReason | None = None
        self.closed = False
        self.started = False
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0

    def push(self, out: TokenOut) -> bool:
        """Take a token; True where its text completed a stop string and the engine must be told."""
        self._token_ids.append(out.token_id)
        if out.logprobs is not None:
            self._logprobs.append(out.logprobs)
            self._cumulative += out.logprobs.chosen
        stopped = False
        if out.visible:
            decoded = self._detokenizer.push((out.token_id,))
            self._text.append(decoded.text)
            stopped = decoded.stopped
        if stopped:
            self.finish = FinishReason.STOP
        elif out.finish is not None:
            self._text.append(self._detokenizer.finish())
            self.finish = out.finish
        return stopped and out.finish is None

    def due(self, interval: int) -> bool:
        """Is there something to stream: an end, a first text, or ``interval`` tokens of text?"""
        if self.closed:
            return False
        if self.finish is not None:
            return True
        return any(self._text) and (not self.started or len(self._token_ids) >= interval)

    def take(self) -> SequenceDelta:
        """All that has not been sent; a sequence that has ended is closed with it."""
        delta = SequenceDelta(
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self.finish,
            sample_index=self.sample_index,
            cumulative_logprob=self._cumulative,
            logprobs=self._logprobs,
        )
        self._text, self._token_ids, self._logprobs = [], [], []
        self.started = True
        self.closed = self.finish is not None
        return delta


class Answer:
    """One row of a client's request on its way out: its sequences and when to send what."""

    def __init__(
        self,
        client: ClientRequest,
        call: GenerateCall,
        request: Request,
        pieces: TokenPieces,
        wire: WireSettings,
        prompt_text: str,
        to_ns: Settled,
        block_size: int,
    ) -> None:
        params = request.params
        self.client = client
        self.group = request.group
        self.call = call
        self.record = RequestRecord(
            client.request_id,
            request.group,
            request.tenant,
            request.num_prompt_tokens,
            params.n,
            params.max_tokens,
            request.arrival,
        )
        self._prompt_ids = request.prompt_ids
        self._prompt_text = prompt_text
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._pieces = pieces
        self._wire = wire
        self._to_ns = to_ns
        self._block_size = block_size
        self.sequences = [
            Sequence(
                index,
                Detokenizer(
                    pieces,
                    request.prompt_ids,
                    stop=params.stop,
                    include_stop=params.include_stop_str_in_output,
                    skip_special_tokens=params.skip_special_tokens,
                    min_tokens=params.min_tokens,
                ),
            )
            for index in range(params.n)
        ]

    @property
    def ended(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)

    @property
    def urgent(self) -> bool:
        """Whether a client waits for more than the next piece of a text that has begun."""
        return any(not s.closed and (s.finish is not None or not s.started) for s in self.sequences)

    def on_prompt(self, out: PromptOut) -> None:
        """A chunk of the prompt was computed; after a preemption it comes again and counts once."""
        self.record.first_scheduled = out.first_scheduled
        self.record.num_cached_tokens = out.num_cached
        missing = self.record.num_prompt_tokens - 1 - len(self._prompt_logprobs)
        self._prompt_logprobs += out.logprobs[:missing]

    def on_token(self, out: TokenOut, now: float) -> bool:
        """Take a token; True where the engine must end that sequence (a stop string)."""
        sequence = self.sequences[out.sample_index]
        if sequence.finish is not None:
            return False
        if self.record.first_token is None:
            self.record.first_token = now
        self.record.last_token = now
        self.record.num_output_tokens += 1
        stopped = sequence.push(out)
        if sequence.finish is not None:
            self.record.finish_reasons.append(sequence.finish.value)
        return stopped

    def responses(self) -> Iterator[dict[str, Array]]:
        """What should be sent now, one response at a time."""
        options = self.call.options
        if options.stream:
            for sequence in self.sequences:
                if sequence.due(options.stream_interval):
                    yield self._encode([sequence])
        elif self.ended and not self.sequences[0].closed:
            if options.grouped:
                yield self._encode(self.sequences)
            else:
                for sequence in self.sequences:
                    yield self._encode([sequence])

    def _encode(self, sequences: list[Sequence]) -> dict[str, Array]:
        deltas = [sequence.take() for sequence in sequences]
        return encode(deltas, self._facts, self.call.options, self._wire, self._pieces.text)

    def _facts(self) -> RequestFacts:
        record = self.record
        num_tokens = record.num_prompt_tokens + record.num_output_tokens // record.num_samples
        total = -(-num_tokens // self._block_size)
        reused = record.num_cached_tokens // self._block_size
        scored = self.call.params.prompt_logprobs is not None
        return RequestFacts(
            num_input_tokens=record.num_prompt_tokens,
            batch_index=self.call.batch_index,
            prompt_text=self._prompt_text,
            prompt_ids=self._prompt_ids,
            prompt_logprobs=[None, *self._prompt_logprobs] if scored else None,
            new_blocks=total - reused,
            reused_blocks=reused,
            total_blocks=total,
            arrival_ns=self._to_ns(record.arrival),
            first_scheduled_ns=self._ns(record.first_scheduled),
            first_token_ns=self._ns(record.first_token),
            last_token_ns=self._ns(record.last_token),
        )

    def _ns(self, seconds: float | None) -> int | None:
        return None if seconds is None else self._to_ns(seconds)
