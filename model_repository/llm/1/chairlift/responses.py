"""What a sequence produced -> the output tensors of one response; plain numpy, no server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from chairlift.calls import OutputOptions, WireSettings
from chairlift.request import FinishReason, TokenLogprobs
from chairlift.tensors import NUMPY_TYPES, Array

TokenText = Callable[[int], str]

# JSON has no -Infinity; this is what vLLM writes for a token that cannot be drawn.
_LOWEST_LOGPROB = -9999.0


class SequenceDelta(NamedTuple):
    """What is new in one sequence since its last response; counts and log-probabilities of tokens
    whose text was held back travel with the text."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: FinishReason | None = None
    sample_index: int = 0
    cumulative_logprob: float = 0.0
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is the same for every sequence of a request; ``prompt_text`` goes in front of an echo.

    Times are nanoseconds since the epoch. What is ``None`` is not known yet and is left out.
    """

    num_input_tokens: int
    batch_index: int = 0
    prompt_text: str = ""
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    new_blocks: int | None = None
    reused_blocks: int | None = None
    total_blocks: int | None = None
    arrival_ns: int | None = None
    first_scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None


class _Context:
    """What outputs are made from; the facts only where one of them wants any."""

    def __init__(
        self,
        deltas: Sequence[SequenceDelta],
        make_facts: Callable[[], RequestFacts],
        options: OutputOptions,
        token_text: TokenText,
    ) -> None:
        self.deltas = deltas
        self.options = options
        self.token_text = token_text
        self._make_facts = make_facts

    @cached_property
    def facts(self) -> RequestFacts:
        return self._make_facts()


class OutputSpec(NamedTuple):
    """Triton's type (COUNT: UINT32 to vLLM's clients, INT32 to the others), dims, and the values,
    ``None`` where there is nothing to send."""

    datatype: str
    dims: tuple[int, ...]
    values: Callable[[_Context], Any]


def _per_sequence(value: Callable[[SequenceDelta], object]) -> Callable[[_Context], list[object]]:
    return lambda context: [value(delta) for delta in context.deltas]


def _fact(name: str) -> Callable[[_Context], list[int] | None]:
    def read(context: _Context) -> list[int] | None:
        value = getattr(context.facts, name)
        return None if value is None else [value]

    return read


def _texts(context: _Context) -> list[bytes]:
    echo = context.facts.prompt_text if context.options.echo else ""
    return [(echo + delta.text).encode() for delta in context.deltas]


def _logprobs(context: _Context) -> list[bytes]:
    if not context.options.logprobs_asked:
        return [b"null"] * len(context.deltas)
    return [
        _logprobs_json(delta.token_ids, delta.logprobs, context.token_text)
        for delta in context.deltas
    ]


def _prompt_logprobs(context: _Context) -> list[bytes] | None:
    facts = context.facts
    if facts.prompt_logprobs is None:
        return None
    return [_logprobs_json(facts.prompt_ids, facts.prompt_logprobs, context.token_text)]


def _chosen_logprobs(context: _Context) -> list[list[float]]:
    """[sequences, tokens], the shorter ones filled with zeros."""
    rows = [[entry.chosen for entry in delta.logprobs] for delta in context.deltas]
    longest = max(map(len, rows))
    return [row + [0.0] * (longest - len(row)) for row in rows]


def _logprobs_json(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], token_text: TokenText
) -> bytes:
    """One map per token of id -> logprob, rank and text: the chosen token, then the most likely.

    The first token of a prompt has no probability: null.
    """
    tokens = [
        entry and _token_json(token_id, entry, token_text)
        for token_id, entry in zip(token_ids, entries, strict=True)
    ]
    return json.dumps(tokens).encode()


def _token_json(
    token_id: int, entry: TokenLogprobs, token_text: TokenText
) -> dict[str, dict[str, object]]:
    ranked = [(token_id, entry.chosen, entry.rank)]
    ranked += [
        (other, value, rank)
        for rank, (other, value) in enumerate(entry.top, 1)
        if other != token_id
    ]
    return {
        str(other): {
            "logprob": max(value, _LOWEST_LOGPROB),
            "rank": rank,
            "decoded_token": token_text(other),
        }
        for other, value, rank in ranked
    }


def _reason(delta: SequenceDelta) -> bytes:
    """vLLM's clients see the text "None" until a sequence has ended."""
    return (delta.finish_reason.value if delta.finish_reason else "None").encode()


_CUMULATIVE = _per_sequence(lambda delta: delta.cumulative_logprob)

# Every output that config.pbtxt declares; LiteLLM reads the first one as the text.
OUTPUTS: dict[str, OutputSpec] = {
    "text_output": OutputSpec("STRING", (-1,), _texts),
    "finish_reason": OutputSpec("STRING", (-1,), _per_sequence(_reason)),
    "cumulative_logprob": OutputSpec("FP32", (-1,), _CUMULATIVE),
    "logprobs": OutputSpec("STRING", (-1,), _logprobs),
    "prompt_logprobs": OutputSpec("STRING", (1,), _prompt_logprobs),
    "num_input_tokens": OutputSpec("COUNT", (1,), _fact("num_input_tokens")),
    "num_output_tokens": OutputSpec("COUNT", (-1,), _per_sequence(lambda d: len(d.token_ids))),
    "cum_log_probs": OutputSpec("FP32", (-1,), _CUMULATIVE),
    "output_log_probs": OutputSpec("FP32", (-1, -1), _chosen_logprobs),
    "batch_index": OutputSpec("INT32", (1,), _fact("batch_index")),
    "sequence_index": OutputSpec("INT32", (1,), lambda c: [c.deltas[0].sample_index]),
    "kv_cache_alloc_new_blocks": OutputSpec("INT32", (1,), _fact("new_blocks")),
    "kv_cache_reused_blocks": OutputSpec("INT32", (1,), _fact("reused_blocks")),
    "kv_cache_alloc_total_blocks": OutputSpec("INT32", (1,), _fact("total_blocks")),
    "arrival_time_ns": OutputSpec("INT64", (1,), _fact("arrival_ns")),
    "first_scheduled_time_ns": OutputSpec("INT64", (1,), _fact("first_scheduled_ns")),
    "first_token_time_ns": OutputSpec("INT64", (1,), _fact("first_token_ns")),
    "last_token_time_ns": OutputSpec("INT64", (1,), _fact("last_token_ns")),
    # TensorRT-LLM's client reads them with the others; nothing is drafted here.
    "acceptance_rate": OutputSpec("FP32", (1,), lambda _: [0.0]),
    "total_accepted_draft_tokens": OutputSpec("INT32", (1,), lambda _: [0]),
    "total_draft_tokens": OutputSpec("INT32", (1,), lambda _: [0]),
}


# TensorRT-LLM sends its text without the batch dimension of everything else, whatever its config
# says, and its client, llama-index and langchain decode what they find in the first dimension.
_NEVER_BATCHED = "text_output"


def output_type(name: str, *, batched: bool) -> str:
    """Triton's type of an output in an entry with or without a batch dimension."""
    datatype = OUTPUTS[name].datatype
    return datatype if datatype != "COUNT" else ("INT32" if batched else "UINT32")


def encode(
    deltas: Sequence[SequenceDelta],
    make_facts: Callable[[], RequestFacts],
    options: OutputOptions,
    wire: WireSettings,
    token_text: TokenText,
) -> dict[str, Array]:
    """One response: the tensors that were asked for, with a leading 1 in a batched entry on all
    but `text_output`.

    ``deltas`` is one sequence, or all ``n`` of them where ``options.grouped``.
    """
    context = _Context(deltas, make_facts, options, token_text)
    tensors: dict[str, Array] = {}
    for name in options.outputs:
        values = OUTPUTS[name].values(context)
        if values is not None:
            datatype = output_type(name, batched=wire.batched)
            array = np.array(values, dtype=NUMPY_TYPES[datatype])
            batched = wire.batched and name != _NEVER_BATCHED
            tensors[name] = array[np.newaxis] if batched else array
    return tensors
