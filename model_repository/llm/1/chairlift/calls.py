"""What the wire asks for, in plain Python: the calls, and the settings they are read under."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from chairlift.errors import ErrorCode, RequestError
from chairlift.request import SamplingParams

Dialect = Literal["trtllm", "vllm"]
DefaultSampling = Literal["dialect", "greedy", "random"]

ErrorStyle = Literal["plain", "vllm", "coded"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one request may bring; a longer list or text is refused by name."""

    prompt_bytes: int = 1 << 20
    sampling_parameters_bytes: int = 1 << 18
    messages: int = 1024
    rows: int = 64
    samples: int = 16
    stop_strings: int = 16
    stop_string_bytes: int = 512
    stop_token_ids: int = 128
    bad_words: int = 64
    bad_word_bytes: int = 128
    logit_bias: int = 1024
    logprobs: int = 20
    tag_bytes: int = 256
    stream_interval: int = 1024


@dataclass(frozen=True, slots=True)
class WireSettings:
    """How one model entry speaks.

    ``batched`` entries carry a leading batch dimension on every tensor. ``ignored_parameters`` are
    request parameters to pass over beside those that known clients send. ``relayed`` is true for a
    request that comes through `llm_infer`, which can take one response only.
    """

    dialect: Dialect = "trtllm"
    batched: bool = True
    model_name: str = "llm"
    default_max_tokens: int = 16
    default_sampling: DefaultSampling = "dialect"
    stream_interval: int = 1
    vllm_error_prefix: bool = True
    ignored_parameters: frozenset[str] = frozenset()
    relayed: bool = False
    limits: Limits = field(default_factory=Limits)

    @property
    def error_style(self) -> ErrorStyle:
        if self.relayed:
            return "coded"
        return "vllm" if self.dialect == "vllm" and self.vllm_error_prefix else "plain"


class Message(NamedTuple):
    """One turn of a chat; ``role`` is one of a fixed set, so it can never spell a control token."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Completion style: special tokens written in the text are parsed, as Hugging Face does."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Ids of the client's own tokenizer, used as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Turns to which the model's chat template is applied; their text is never parsed."""

    messages: tuple[Message, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What to send back, and how.

    ``outputs`` are the tensors to emit, in order. ``grouped``: the ``n`` samples travel as ``n``
    elements of one response. ``logprobs_asked`` tells an empty list from vLLM's ``null``.
    """

    outputs: tuple[str, ...] = ("text_output",)
    stream: bool = False
    stream_interval: int = 1
    echo: bool = False
    grouped: bool = False
    logprobs_asked: bool = False


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One prompt to continue; a Triton request with B rows makes B of them.

    ``priority``: lower is sooner. ``deadline_ms`` counts from arrival.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    options: OutputOptions
    batch_index: int = 0
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_ms: float | None = None
    error_style: ErrorStyle = "plain"

    def error(self, error: RequestError) -> RequestError:
        """The same error as this client should read it."""
        return styled(error, self.error_style)


@dataclass(frozen=True, slots=True)
class StopCall:
    """TensorRT-LLM's `stop` message: cancel the running request of the same id."""

    request_id: str


def styled(error: RequestError, style: ErrorStyle) -> RequestError:
    """vLLM's clients look for a prefix on what is their own mistake; a relay, to which Triton hands
    on the message but not the code, for the code."""
    if style == "coded":
        return RequestError(f"[{error.code.value}] {error.message}", error.code)
    if style == "vllm" and error.code is ErrorCode.INVALID_ARG:
        return RequestError(f"Error generating stream: {error.message}", error.code)
    return error
