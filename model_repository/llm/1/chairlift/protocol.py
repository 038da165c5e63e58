"""One Triton request -> the calls it stands for; plain numpy, no server.

The order of precedence is a tensor of its own, then the `sampling_parameters` JSON, then request
parameters; where the JSON is there, request parameters that shape the sampling are not looked at
(vllm_backend's rule, and its own client sends both).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from chairlift.calls import (
    ChatPrompt,
    GenerateCall,
    Limits,
    OutputOptions,
    Prompt,
    StopCall,
    TextPrompt,
    TokenPrompt,
    WireSettings,
    styled,
)
from chairlift.errors import ErrorCode, RequestError
from chairlift.messages import parse_messages
from chairlift.parameters import CANONICAL, FIELDS, Values, sampling_params
from chairlift.responses import OUTPUTS
from chairlift.tensors import Array, Row, split_rows
from chairlift.values import as_int, as_text, load_json, refuse, shorten

Given = dict[str, tuple[str, object]]  # field -> the name it came under, and its value

_PROMPT_INPUTS = ("text_input", "messages", "input_ids")
_NOT_FIELDS = frozenset(
    (*_PROMPT_INPUTS, "input_lengths", "sampling_parameters", "embedding_request", "stop")
)

# A gateway's word on who asks holds beside a client's sampling_parameters.
_REQUEST_FIELDS = frozenset(("llm_priority", "tenant", "cache_salt", "deadline_ms"))

# How `llm_infer` tells that a request is one of its own.
_RELAYED = "chairlift_relay"

# What known clients and the server send along: /generate's own id, TensorRT-LLM's client, Triton's
# reserved names, trace headers. Other forwarded headers are known by the dash in their names.
_IGNORED_PARAMETERS = frozenset(
    ("id", "Streaming", "streaming", "model", "binary_data_output", "headers", "timeout")
    + ("sequence_id", "sequence_start", "sequence_end", "traceparent", "tracestate", "baggage")
    + ("host", "accept", "authorization", "connection", "cookie", "date", "expect", "forwarded")
    + ("origin", "range", "referer", "upgrade", "via")
)

_PERF_OUTPUTS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
_FLAG_OUTPUTS: dict[str, tuple[str, ...]] = {
    "return_finish_reason": ("finish_reason",),
    "return_cumulative_logprob": ("cumulative_logprob",),
    "return_logprobs": ("logprobs",),
    "return_num_input_tokens": ("num_input_tokens",),
    "return_num_output_tokens": ("num_output_tokens",),
    "return_log_probs": ("cum_log_probs", "output_log_probs"),
    "return_perf_metrics": _PERF_OUTPUTS,
}


def parse(
    inputs: Mapping[str, Array],
    parameters: Mapping[str, str | int | float | bool],
    request_id: str,
    wire: WireSettings,
    requested: Collection[str] = (),
) -> list[GenerateCall] | StopCall:
    """Tensors and request parameters -> one call per row, or a request to stop another.

    ``requested``: names of the outputs wanted, as Triton lists them (all of them where the client
    named none). Raises `RequestError`, in the words of the dialect.
    """
    wire = wire_of(inputs, parameters, wire)
    inputs = {"text_input" if n == "vllm_text_input" else n: t for n, t in inputs.items()}
    try:
        if _is_stop(inputs):
            return _stop_call(request_id)
        rows = split_rows(inputs, wire)
        named = set(requested) if len(requested) < len(OUTPUTS) else set()
        named |= {"batch_index"} if len(rows) > 1 else set()
        return [
            replace(
                _row_call(row, parameters, wire, named),
                request_id=request_id,
                batch_index=index,
                error_style=wire.error_style,
            )
            for index, row in enumerate(rows)
        ]
    except RequestError as error:
        raise styled(error, wire.error_style) from None


def wire_of(
    inputs: Mapping[str, Array], parameters: Mapping[str, object], wire: WireSettings
) -> WireSettings:
    """The settings for one request: it may come through `vllm_model` or the relay."""
    if "vllm_text_input" in inputs:
        wire = replace(wire, dialect="vllm")
    if parameters.get(_RELAYED) is True:
        wire = replace(wire, relayed=True)
    return wire


def _is_stop(inputs: Mapping[str, Array]) -> bool:
    stop = inputs.get("stop")
    return stop is not None and stop.dtype == bool and bool(stop.any())


def _stop_call(request_id: str) -> StopCall:
    if not request_id:
        raise RequestError("A request id must be provided for request cancellation")
    return StopCall(request_id)


def _row_call(
    row: Row, parameters: Mapping[str, object], wire: WireSettings, requested: Collection[str]
) -> GenerateCall:
    if row.get("embedding_request"):
        text = f"Model {wire.model_name} does not support 'embed' request"
        raise RequestError(text, ErrorCode.UNSUPPORTED)
    prompt = _prompt(row, wire.limits)
    values = _values(row, parameters, wire)
    params = sampling_params(values, wire)
    return GenerateCall(
        request_id="",
        prompt=prompt,
        params=params,
        options=_options(values, params.n, wire, requested),
        priority=values.get("llm_priority", 0),
        tenant=values.get("tenant", ""),
        cache_salt=values.get("cache_salt", ""),
        deadline_ms=values.get("deadline_ms"),
    )


def _prompt(row: Row, limits: Limits) -> Prompt:
    given = [name for name in _PROMPT_INPUTS if name in row]
    if not given:
        raise RequestError("text_input is required")
    if len(given) > 1:
        raise RequestError(f"give one prompt, not both {given[0]} and {given[1]}")
    value = row[given[0]]
    if given[0] == "text_input":
        return TextPrompt(as_text("text_input", value, limits.prompt_bytes))
    if given[0] == "messages":
        return ChatPrompt(parse_messages(value, limits))
    length = as_int("input_lengths", row.get("input_lengths", len(value)), 1, len(value))
    return TokenPrompt(tuple(value[:length]))  # behind the length comes padding


def _values(row: Row, parameters: Mapping[str, object], wire: WireSettings) -> Values:
    """Merge the three sources by precedence and read each value by its rule."""
    tensors = _given({name: v for name, v in row.items() if name not in _NOT_FIELDS})
    text = row.get("sampling_parameters")
    if text is None:
        layers = [tensors, _given(_known_parameters(parameters, wire))]
    else:
        about = {n: v for n, v in parameters.items() if CANONICAL.get(n) in _REQUEST_FIELDS}
        layers = [tensors, _given(_json_parameters(text, wire.limits)), _given(about)]
    merged: Given = {}
    for layer in reversed(layers):
        merged |= layer
    values: dict[str, Any] = {}
    for field, (name, value) in merged.items():
        values[field] = FIELDS[field].read(name, value, wire.limits)
    return {field: value for field, value in values.items() if value is not None}


def _known_parameters(parameters: Mapping[str, object], wire: WireSettings) -> dict[str, object]:
    """Request parameters that mean something here; a misspelt name is refused, not dropped."""
    ignored = _IGNORED_PARAMETERS | wire.ignored_parameters
    for name in parameters:
        known = name in CANONICAL or name in ignored or name == _RELAYED
        if not known and "-" not in name and not name.startswith("triton_"):
            raise RequestError(f"unknown request parameter {shorten(name)}")
    return {name: value for name, value in parameters.items() if name in CANONICAL}


def _json_parameters(text: object, limits: Limits) -> dict[str, object]:
    name = "sampling_parameters"
    loaded = load_json(name, as_text(name, text, limits.sampling_parameters_bytes))
    if not isinstance(loaded, dict):
        refuse(name, "a JSON object", loaded)
    for key in loaded:
        if key not in CANONICAL:
            raise RequestError(f"unknown key {shorten(key)} in {name}")
    return loaded


def _given(values: Mapping[str, object]) -> Given:
    """Known names -> fields; null means not given, two names of one field must agree."""
    given: Given = {}
    for name, value in values.items():
        if value is None:
            continue
        field = CANONICAL[name]
        other, earlier = given.get(field, (name, value))
        if earlier != value:
            raise RequestError(
                f"{other} {shorten(earlier)} and {name} {shorten(value)} mean the same and differ"
            )
        given[field] = (name, value)
    return given


def _options(
    values: Values, n: int, wire: WireSettings, requested: Collection[str]
) -> OutputOptions:
    vllm = wire.dialect == "vllm"
    stream = values.get("stream", False)
    exclude = values.get("exclude_input_in_output")
    if vllm and stream and exclude is False:
        raise RequestError("When streaming, `exclude_input_in_output` = False is not allowed.")
    grouped = (vllm or wire.relayed) and not stream and n > 1
    return OutputOptions(
        outputs=tuple(_outputs(values, n > 1 and not grouped, requested)),
        stream=stream,
        stream_interval=values.get("stream_interval", wire.stream_interval),
        # Absent means an echo to vLLM's clients alone; TensorRT-LLM's never see it in a stream.
        echo=not stream and not (not vllm if exclude is None else exclude),
        grouped=grouped,
        logprobs_asked="logprobs" in values,
    )


def _outputs(values: Values, numbered: bool, requested: Collection[str]) -> Iterable[str]:
    """Names of the tensors to emit: `text_output` first, and alone if nothing else is asked."""
    yield "text_output"
    for flag, names in _FLAG_OUTPUTS.items():
        if values.get(flag):
            yield from names
    if values.get("prompt_logprobs") is not None:
        yield "prompt_logprobs"
    if "batch_index" in requested:
        yield "batch_index"
    if numbered or "sequence_index" in requested:
        yield "sequence_index"
