"""The one table of everything a request can say beside its prompt, and the rules of each value.

A field has one name here and its other names as aliases; it may come as a tensor of its own, in the
`sampling_parameters` JSON or as a request parameter, and means the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from chairlift.calls import Limits, WireSettings
from chairlift.errors import ErrorCode, RequestError
from chairlift.request import SamplingParams
from chairlift.values import (
    FLOAT32_MAX,
    as_bias,
    as_flag,
    as_float,
    as_ids,
    as_int,
    as_text,
    as_texts,
)

# Below this the noise (at most 17 for a hash of 24 bits) moves a token past another only if their
# logits are closer than 0.002: greedy but for ties, and a division by 1e-38 never happens.
_GREEDY_BELOW = 1e-4

_INT64_MAX = 2**63 - 1

Values = Mapping[str, Any]
Reader = Callable[[str, object, Limits], Any]


class Field(NamedTuple):
    """How to read a value, and the other names that it goes by."""

    read: Reader
    aliases: tuple[str, ...] = ()


def _int(low: int, high: int, want: str = "") -> Reader:
    return lambda name, value, limits: as_int(name, value, low, high, want)


def _float(low: float, high: float, *, above: bool = False) -> Reader:
    return lambda name, value, limits: as_float(name, value, low, high, above=above)


def _flag(name: str, value: object, limits: Limits) -> bool:
    return as_flag(name, value)


def _tag(name: str, value: object, limits: Limits) -> str:
    return as_text(name, value, limits.tag_bytes)


def _seed(name: str, value: object, limits: Limits) -> int:
    """Unsigned on the wire; the engine keeps the same 64 bits as a signed integer."""
    seed = as_int(name, value, 0, 2**64 - 1)
    return seed - 2**64 if seed >= 2**63 else seed


def _logprobs(name: str, value: object, limits: Limits) -> int | None:
    """A number of alternatives; OpenAI's frontend hands on its boolean, false by default."""
    if isinstance(value, bool):
        return 0 if value else None
    return as_int(name, value, 0, limits.logprobs)


def _refused(name: str) -> NoReturn:
    raise RequestError(f"{name} is not supported", ErrorCode.UNSUPPORTED)


def _unless_empty(name: str, value: object, limits: Limits) -> None:
    """A feature that is not offered; an empty value does not ask for it."""
    if value and value not in (b"", [b""], [""]):
        _refused(name)


def _never(name: str, value: object, limits: Limits) -> None:
    _refused(name)


def _only(neutral: int | bool) -> Reader:
    """A feature that is not offered; its neutral value does not ask for it."""

    def read(name: str, value: object, limits: Limits) -> None:
        given = (
            as_flag(name, value) if isinstance(neutral, bool) else as_int(name, value, 0, 2**31 - 1)
        )
        if given != neutral:
            _refused(name)

    return read


def _no_lora(name: str, value: object, limits: Limits) -> NoReturn:
    raise RequestError("LoRA feature is not enabled.", ErrorCode.UNSUPPORTED)


FIELDS: dict[str, Field] = {
    # How long
    "max_tokens": Field(
        _int(1, _INT64_MAX, want="a single value > 0 and below 2**63"), ("request_output_len",)
    ),
    "min_tokens": Field(_int(0, _INT64_MAX), ("min_length",)),
    "ignore_eos": Field(_flag),
    "end_id": Field(_int(-1, 2**31 - 1)),
    "stop": Field(
        lambda n, v, lim: as_texts(n, v, lim.stop_strings, lim.stop_string_bytes), ("stop_words",)
    ),
    "stop_token_ids": Field(lambda n, v, lim: as_ids(n, v, lim.stop_token_ids)),
    "include_stop_str_in_output": Field(_flag),
    # Which token
    "temperature": Field(_float(0, 1e4)),
    "top_k": Field(_int(-1, _INT64_MAX)),
    "top_p": Field(_float(-FLOAT32_MAX, 1)),
    "min_p": Field(_float(0, 1)),
    "seed": Field(_seed, ("random_seed",)),
    "repetition_penalty": Field(_float(0, 1e4, above=True)),
    "presence_penalty": Field(_float(-2, 2)),
    "frequency_penalty": Field(_float(-2, 2)),
    "logit_bias": Field(lambda n, v, lim: as_bias(n, v, lim.logit_bias)),
    "bad_words": Field(lambda n, v, lim: as_texts(n, v, lim.bad_words, lim.bad_word_bytes)),
    "n": Field(lambda n, v, lim: as_int(n, v, 1, lim.samples), ("num_return_sequences",)),
    # What to send back
    "stream": Field(_flag),
    "stream_interval": Field(lambda n, v, lim: as_int(n, v, 1, lim.stream_interval)),
    "exclude_input_in_output": Field(_flag),
    "skip_special_tokens": Field(_flag),
    "logprobs": Field(_logprobs),
    "top_logprobs": Field(lambda n, v, lim: as_int(n, v, 0, lim.logprobs)),
    "prompt_logprobs": Field(_logprobs),
    "return_finish_reason": Field(_flag),
    "return_cumulative_logprob": Field(_flag),
    "return_logprobs": Field(_flag),
    "return_num_input_tokens": Field(_flag),
    "return_num_output_tokens": Field(_flag),
    "return_log_probs": Field(_flag),
    "return_perf_metrics": Field(_flag),
    # Who asks, and how urgently
    "llm_priority": Field(_int(-(2**31), 2**31 - 1), ("priority",)),
    "tenant": Field(_tag, ("user",)),
    "cache_salt": Field(_tag),
    "deadline_ms": Field(_float(0, 1e9, above=True)),
    # Accepted, and without effect here
    "length_penalty": Field(_float(-FLOAT32_MAX, FLOAT32_MAX)),
    "early_stopping": Field(_flag),
    "pad_id": Field(_int(-(2**31), 2**31 - 1)),
    "spaces_between_special_tokens": Field(_flag),
    # Refused where used
    "beam_width": Field(_only(1)),
    "best_of": Field(_only(1)),
    "use_beam_search": Field(_only(False)),
    "detokenize": Field(_only(True)),
    "return_context_logits": Field(_only(False)),
    "return_generation_logits": Field(_only(False)),
    "image": Field(_unless_empty),
    "guided_decoding_guide_type": Field(_unless_empty),
    "guided_decoding_guide": Field(_unless_empty),
    "guided_decoding": Field(_unless_empty),
    "structured_outputs": Field(_unless_empty),
    "allowed_token_ids": Field(_unless_empty),
    "logits_processors": Field(_unless_empty),
    "truncate_prompt_tokens": Field(_never),
    "lora_task_id": Field(_never),
    "lora_name": Field(_no_lora),
}

CANONICAL: dict[str, str] = {name: name for name in FIELDS} | {
    alias: name for name, field in FIELDS.items() for alias in field.aliases
}


def sampling_params(values: Values, wire: WireSettings) -> SamplingParams:
    """Clean values -> canonical parameters, with the dialect's defaults; checks across fields."""
    trtllm = wire.dialect == "trtllm"
    max_tokens = values.get("max_tokens", wire.default_max_tokens)
    min_tokens = values.get("min_tokens", 0)
    if min_tokens > max_tokens:
        raise RequestError(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}")
    end_id = values.get("end_id")
    stop_token_ids = values.get("stop_token_ids", ())
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_temperature(values, wire),
        top_k=max(0, values.get("top_k", 0)),
        top_p=_top_p(values, wire),
        min_p=values.get("min_p", 0.0),
        seed=values.get("seed"),
        repetition_penalty=values.get("repetition_penalty", 1.0),
        presence_penalty=values.get("presence_penalty", 0.0),
        frequency_penalty=values.get("frequency_penalty", 0.0),
        logit_bias=values.get("logit_bias", ()),
        bad_words=values.get("bad_words", ()),
        stop=values.get("stop", ()),
        # TensorRT-LLM's end_id stands in place of the model's own; -1: nothing ends early.
        stop_token_ids=stop_token_ids if end_id in (None, -1) else (*stop_token_ids, end_id),
        ignore_eos=values.get("ignore_eos", end_id is not None),
        include_stop_str_in_output=values.get("include_stop_str_in_output", trtllm),
        skip_special_tokens=values.get("skip_special_tokens", True),
        n=values.get("n", 1),
        logprobs=_num_logprobs(values),
        prompt_logprobs=values.get("prompt_logprobs"),
    )


def _temperature(values: Values, wire: WireSettings) -> float:
    """TensorRT-LLM decodes greedily unless asked to sample, vLLM samples unless asked not to."""
    if values.get("top_k") == 1:
        return 0.0
    sampled = wire.default_sampling == "random" or (
        wire.default_sampling == "dialect" and wire.dialect == "vllm"
    )
    asked = values.get("top_k", 0) > 1 or max(values.get("top_p", 0), values.get("min_p", 0)) > 0
    temperature: float = values.get("temperature", 1.0 if sampled or asked else 0.0)
    return 0.0 if temperature <= _GREEDY_BELOW else temperature


def _top_p(values: Values, wire: WireSettings) -> float:
    """TensorRT-LLM clients send 0 for off; in vLLM's dialect it is a mistake."""
    top_p: float = values.get("top_p", 1.0)
    if top_p > 0:
        return top_p
    if wire.dialect == "vllm":
        raise RequestError(f"top_p must be a number above 0 and at most 1, got {top_p:g}")
    return 1.0


def _num_logprobs(values: Values) -> int | None:
    """Alternatives asked for; only the chosen token where just the sum is asked for."""
    if "logprobs" in values:
        return int(max(values["logprobs"], values.get("top_logprobs", 0)))
    needed = values.get("return_cumulative_logprob") or values.get("return_log_probs")
    return 0 if needed else None
