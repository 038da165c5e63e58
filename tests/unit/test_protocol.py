"""What requests mean: names, defaults, precedence and limits; C and P are rows of the contract and
of reported-faults.md."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from chairlift import protocol
from chairlift.calls import (
    ChatPrompt,
    GenerateCall,
    Limits,
    Message,
    StopCall,
    TextPrompt,
    TokenPrompt,
    WireSettings,
)
from chairlift.errors import ErrorCode, RequestError
from chairlift.request import SamplingParams
from chairlift.tensors import INPUTS, NUMPY_TYPES

TRTLLM = WireSettings()
VLLM = WireSettings(dialect="vllm", batched=False, vllm_error_prefix=False)


def tensor(name: str, value: Any, batched: bool) -> Any:
    spec = INPUTS[name]
    row = value if isinstance(value, list) else [value]
    row = [item.encode() if isinstance(item, str) else item for item in row]
    array = np.array(row, dtype=NUMPY_TYPES[spec.datatype])
    return array[np.newaxis] if batched else array


def call(
    wire: WireSettings = TRTLLM,
    parameters: dict[str, Any] | None = None,
    requested: tuple[str, ...] = (),
    **inputs: Any,
) -> GenerateCall:
    inputs = inputs if set(inputs) & {"messages", "input_ids"} else {"text_input": "hi"} | inputs
    tensors = {name: tensor(name, value, wire.batched) for name, value in inputs.items()}
    parsed = protocol.parse(tensors, parameters or {}, "id", wire, requested)
    assert not isinstance(parsed, StopCall)
    (only,) = parsed
    return only


def by_json(wire: WireSettings = VLLM, **fields: Any) -> GenerateCall:
    return call(wire, sampling_parameters=json.dumps(fields))


def params(wire: WireSettings = TRTLLM, /, **given: Any) -> SamplingParams:
    """The same fields as request parameters."""
    return call(wire, given).params


def refusal(*args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    return caught.value


def test_the_least_request() -> None:
    found = call()
    assert found.prompt == TextPrompt("hi")
    assert found.params == SamplingParams(temperature=0.0, include_stop_str_in_output=True)
    assert found.options.outputs == ("text_output",)
    assert not found.options.echo
    assert call(VLLM).params == SamplingParams()
    assert call(VLLM).options.echo


def test_prompts() -> None:
    text = json.dumps([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    assert call(messages=text).prompt == ChatPrompt((Message("user", "a"),))
    assert call(input_ids=[5, 6, 7, 0], input_lengths=3).prompt == TokenPrompt((5, 6, 7))
    assert call(text_input="漢字").prompt == TextPrompt("漢字")
    assert refusal(input_ids=[5], text_input="a").message.startswith("give one prompt")
    with pytest.raises(RequestError, match="^text_input is required$"):
        protocol.parse({}, {}, "", TRTLLM)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ("{", "messages"),
        ("[]", "messages"),
        ('{"role": "user"}', "messages"),
        ("[1]", "messages[0]"),
        ('[{"role": "<|x", "content": "a"}]', "messages[0].role"),
        ('[{"role": "user"}]', "messages[0].content"),
        ('[{"role": "user", "content": [{"type": "image"}]}]', "messages[0].content[0]"),
        ('[{"role": "user", "content": "a", "tool_calls": [1]}]', "'tool_calls'"),
        ('[{"role": "user", "content": "\\ud800"}]', "messages[0].content"),
        ("[" * 100000, "messages"),
    ],
)
def test_bad_messages_are_refused_where_they_are_bad(messages: str, place: str) -> None:
    assert place in refusal(messages=messages).message


def test_rows_are_calls_of_their_own() -> None:
    tensors = {
        "text_input": np.array([[b"a"], [b"b"]], dtype=object),
        "max_tokens": np.array([[3], [4]], dtype=np.int32),
        "stop_words": np.array([[b"x", b""], [b"", b""]], dtype=object),
    }
    calls = protocol.parse(tensors, {}, "7", TRTLLM)
    assert not isinstance(calls, StopCall)
    assert [c.prompt for c in calls] == [TextPrompt("a"), TextPrompt("b")]
    assert [(c.batch_index, c.request_id, c.params.max_tokens) for c in calls] == [
        (0, "7", 3),
        (1, "7", 4),
    ]
    assert [c.params.stop for c in calls] == [("x",), ()]
    assert all("batch_index" in c.options.outputs for c in calls)
    tensors["max_tokens"] = np.array([[3]], dtype=np.int32)
    with pytest.raises(RequestError, match="equal numbers of rows.*max_tokens has 1"):
        protocol.parse(tensors, {}, "7", TRTLLM)


def test_precedence_is_tensor_then_json_then_parameter() -> None:
    """C14; and where the JSON is there, request parameters of the sampling are not looked at."""
    text = json.dumps({"max_tokens": 5, "top_k": 6})
    found = call(
        parameters={"max_tokens": 9, "top_k": "bad", "unheard_of": 1, "tenant": "t"},
        sampling_parameters=text,
        max_tokens=3,
    )
    assert (found.params.max_tokens, found.params.top_k, found.tenant) == (3, 6, "t")
    assert call(parameters={"max_tokens": 9}, top_k=4).params.max_tokens == 9


def test_p7_unknown_names_are_refused_and_known_noise_is_not() -> None:
    assert "'temprature'" in refusal(parameters={"temprature": 0.1}).message
    assert "'temprature'" in refusal(sampling_parameters='{"temprature": 0.1}').message
    noise = {"id": "4", "Streaming": True, "user-agent": "x", "triton_x": 1, "traceparent": "0"}
    assert call(parameters=noise) == call()
    own = WireSettings(ignored_parameters=frozenset({"mine"}))
    assert call(own, {"mine": 1}) == call()


@pytest.mark.parametrize("text", ["{", "[]", "null", "", "7", '"x"', "x" * 10**6, '{"top_p": NaN}'])
def test_p7_sampling_parameters_must_be_a_json_object(text: str) -> None:
    error = refusal(sampling_parameters=text)
    assert "sampling_parameters" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize("value", [8, 8.0, "8", "8.0", " 8 "])
def test_p7_c15_forms_of_one_integer(value: object) -> None:
    assert params(max_tokens=value).max_tokens == 8
    assert by_json(max_tokens=value).params.max_tokens == 8


@pytest.mark.parametrize("value", [1, 1.0, "1", "1e0"])
def test_p7_c15_forms_of_one_number(value: object) -> None:
    assert params(temperature=value) == params(temperature=1.0)


@pytest.mark.parametrize(
    ("value", "flag"), [(True, True), ("true", True), ("False", False), (0, False)]
)
def test_c15_forms_of_a_flag(value: object, flag: bool) -> None:
    assert params(ignore_eos=value).ignore_eos is flag
    assert by_json(ignore_eos=value).params.ignore_eos is flag


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", [0, -1, 1.5, True, "x", "", [1], {}, 10**5000, float("nan"), "1_0", "٣"]),
        ("min_tokens", [-1, 1.5, True, 17]),
        ("temperature", [-0.1, "hot", True, float("inf"), 1e5, [], 10**400]),
        ("top_p", [1.0001, "x", True, float("nan")]),
        ("top_k", [-2, 1.5, "x", True]),
        ("min_p", [-0.1, 1.1]),
        ("seed", [-1, 2**64, -(2**63) - 1, 1.5, "x", True]),
        ("repetition_penalty", [0, -1, float("inf")]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1, "x"]),
        ("n", [0, 17, 1.5, True]),
        ("logprobs", [-1, 21, "x"]),
        ("prompt_logprobs", [-1, 21]),
        ("stop", [1, [1], {"a": 1}, ["x"] * 17, "x" * 513]),
        ("stop_token_ids", ["x", [-1], [1.5], [True], [1] * 129, 2**31]),
        ("logit_bias", ["x", [1], {"abc": 1}, {"-1": 5}, {"1": "x"}, {"1": None}, {"1": 1e40}]),
        ("bad_words", [1, [None], ["x"] * 65]),
        ("ignore_eos", [2, "maybe", 1.0, []]),
        ("cache_salt", [1, "x" * 257]),
        ("deadline_ms", [0, -1, "soon"]),
        ("llm_priority", [2**31, "high", 0.5]),
        ("stream_interval", [0, 1025]),
    ],
)
def test_values_out_of_range_or_type_name_the_field(field: str, bad: list[Any]) -> None:
    """P4, P5, P7, L5: one short error with the name and the value, for every source."""
    for value in bad:
        error = refusal(VLLM, {field: value})
        assert error.code is ErrorCode.INVALID_ARG
        assert field in error.message
        assert len(error.message) < 300
        error.message.encode()


def test_l5_huge_max_tokens_are_left_to_the_context() -> None:
    for value in (2**31 - 1, 2**31, 9007199254740993, 1e18):
        assert params(max_tokens=value).max_tokens == value
    message = refusal(parameters={"max_tokens": 0}).message
    assert message.startswith("max_tokens must be a single value > 0")


def test_p2_p12_c10_when_decoding_is_greedy() -> None:
    assert params().greedy
    assert params(top_k=1, temperature=2.0).greedy
    assert params(temperature=1e-4).greedy
    assert params(temperature=1e-38, top_p=0.95, top_k=50, seed=1).greedy
    assert params(temperature=0, seed=1, top_p=0.5, top_k=3).greedy
    assert params(top_p=0.0).greedy  # off, so nothing asks for sampling
    assert params(VLLM, temperature=0).greedy
    for sampled in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert not params(**sampled).greedy
    assert not params(VLLM).greedy
    assert params(WireSettings(default_sampling="random")).temperature == 1.0
    assert params(WireSettings(dialect="vllm", default_sampling="greedy")).greedy


def test_p4_c9_c11_what_is_off() -> None:
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0
    assert params(top_p=0, temperature=1) == params(top_p=1.0, temperature=1)
    assert "top_p" in refusal(VLLM, {"top_p": 0}).message
    assert params(min_p=1).min_p == 1.0


def test_p5_seeds_keep_their_64_bits() -> None:
    seeds = [params(seed=seed).seed for seed in (0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, "7")]
    assert seeds == [0, 2**31, 2**63 - 1, -(2**63), -1, 7]
    assert by_json(seed=None).params.seed is None
    assert call(random_seed=2**64 - 1).params.seed == -1


def test_c12_other_names_mean_the_same() -> None:
    assert call(random_seed=3) == call(seed=3)
    assert call(min_length=3) == call(min_tokens=3)
    assert call(request_output_len=3) == call(max_tokens=3)
    assert call(stop_words=["x"]) == call(parameters={"stop": "x"})
    assert call(num_return_sequences=2) == call(parameters={"n": 2})
    assert call(seed=3, random_seed=3) == call(seed=3)
    message = refusal(seed=3, random_seed=4).message
    assert "seed" in message and "random_seed" in message


def test_c12_empty_words_are_dropped() -> None:
    """LiteLLM always sends one of each."""
    assert call(stop_words=[""], bad_words=[""]) == call()
    assert call(stop_words=[]) == call()


def test_p7_one_stop_string_or_a_list() -> None:
    assert by_json(stop="x").params.stop == by_json(stop=["x"]).params.stop == ("x",)


def test_lists_and_maps() -> None:
    found = by_json(logit_bias={"5": 500, "6": "-1"}, stop_token_ids=[1, "2"], bad_words="w").params
    assert found.logit_bias == ((5, 100.0), (6, -1.0))
    assert (found.stop_token_ids, found.bad_words) == ((1, 2), ("w",))
    assert params(logit_bias='{"5": 1}').logit_bias == ((5, 1.0),)
    assert params(stop_token_ids="[1, 2]").stop_token_ids == (1, 2)


def test_c13_the_stop_string_is_kept_by_dialect() -> None:
    assert params().include_stop_str_in_output
    assert not params(VLLM).include_stop_str_in_output
    assert not params(include_stop_str_in_output=False).include_stop_str_in_output


def test_end_id_stands_in_place_of_the_models() -> None:
    assert call(end_id=-1).params.ignore_eos
    found = call(end_id=7, pad_id=0).params
    assert (found.stop_token_ids, found.ignore_eos) == ((7,), True)
    assert not call(end_id=-1, parameters={"ignore_eos": False}).params.ignore_eos


def test_min_tokens_above_max_tokens() -> None:
    message = refusal(max_tokens=3, min_tokens=4).message
    assert message == "min_tokens 4 is more than max_tokens 3"


def test_c5_c6_r3_echo() -> None:
    for stream in (False, True):
        assert not call(stream=stream).options.echo
        assert not call(stream=stream, exclude_input_in_output=True).options.echo
    assert call(exclude_input_in_output=False).options.echo
    assert not call(exclude_input_in_output=False, stream=True).options.echo
    assert not call(VLLM, exclude_input_in_output=True).options.echo
    assert not call(VLLM, stream=True).options.echo
    message = refusal(VLLM, stream=True, exclude_input_in_output=False).message
    assert message == "When streaming, `exclude_input_in_output` = False is not allowed."


def test_c21_samples_in_one_response_or_several() -> None:
    assert call(VLLM, {"n": 2}).options.grouped
    streamed = call(VLLM, {"n": 2}, stream=True).options
    assert not streamed.grouped and "sequence_index" in streamed.outputs
    apart = call(num_return_sequences=2).options
    assert not apart.grouped and "sequence_index" in apart.outputs
    assert call(TRTLLM, {"n": 2, "chairlift_relay": True}).options.grouped


def test_outputs_are_what_was_asked_for() -> None:
    found = call(return_finish_reason=True, return_perf_metrics=True, return_logprobs=False)
    assert found.options.outputs[:2] == ("text_output", "finish_reason")
    assert len(found.options.outputs) == 2 + 7
    assert call(requested=("text_output", "batch_index")).options.outputs[1:] == ("batch_index",)
    every = tuple(protocol.OUTPUTS)
    assert call(requested=every).options.outputs == ("text_output",)
    assert "prompt_logprobs" in by_json(prompt_logprobs=0).options.outputs


def test_c18_log_probabilities() -> None:
    asked = call(VLLM, {"logprobs": 2}, return_logprobs=True)
    assert (asked.params.logprobs, asked.options.logprobs_asked) == (2, True)
    null = call(VLLM, return_logprobs=True)
    assert (null.params.logprobs, null.options.logprobs_asked) == (None, False)
    for flag in ("return_cumulative_logprob", "return_log_probs"):
        assert call(**{flag: True}).params.logprobs == 0
    # OpenAI's frontend hands on its chat fields as they are.
    assert by_json(logprobs=False, top_logprobs=0).params.logprobs is None
    assert by_json(logprobs=True, top_logprobs=3).params.logprobs == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 3),
        ("return_context_logits", True),
        ("return_generation_logits", True),
        ("image", ["aGk="]),
        ("lora_task_id", 1),
        ("guided_decoding_guide_type", "json"),
        ("guided_decoding_guide", "{}"),
    ],
)
def test_c10_unsupported_inputs_are_named(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.code is ErrorCode.UNSUPPORTED
    assert name in error.message


@pytest.mark.parametrize(
    ("field", "used", "neutral"),
    [
        ("best_of", 2, 1),
        ("use_beam_search", True, False),
        ("structured_outputs", '{"choice": ["a"]}', ""),
        ("guided_decoding", "{}", None),
        ("allowed_token_ids", [1], []),
        ("detokenize", False, True),
    ],
)
def test_unsupported_fields_are_refused_where_used(field: str, used: Any, neutral: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        by_json(**{field: used})
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert by_json(**{field: neutral}) == by_json()


def test_texts_that_clients_match() -> None:
    """Section 8.4."""
    styled = WireSettings(dialect="vllm", batched=False, model_name="m")
    text = (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )
    assert refusal(styled, stream=True, exclude_input_in_output=False).message == text
    embed = refusal(styled, embedding_request="{}")
    assert embed.message == "Model m does not support 'embed' request"
    assert embed.code is ErrorCode.UNSUPPORTED
    lora = refusal(styled, sampling_parameters='{"lora_name": "x"}')
    assert lora.message == "LoRA feature is not enabled."
    assert refusal(styled, {"top_k": -5}).message.startswith("Error generating stream: top_k")
    late = call(styled).error(RequestError("too long"))
    assert late.message == "Error generating stream: too long"
    coded = call(parameters={"chairlift_relay": True}).error(RequestError("too long"))
    assert coded.message == "[INVALID_ARG] too long"


def test_the_stop_message() -> None:
    tensors = {
        "stop": np.array([[True]]),
        "input_ids": np.zeros((1, 1), np.int32),
        "request_output_len": np.array([[0]], np.uint32),
    }
    assert protocol.parse(tensors, {"Streaming": True}, "9", TRTLLM) == StopCall("9")
    with pytest.raises(RequestError, match="^A request id must be provided for request cancel"):
        protocol.parse(tensors, {}, "", TRTLLM)
    assert call(stop=False) == call()


def test_a_facade_tells_its_dialect_by_the_prompts_name() -> None:
    tensors = {"vllm_text_input": np.array([[b"hi"]], dtype=object)}
    calls = protocol.parse(tensors, {}, "id", TRTLLM)
    assert not isinstance(calls, StopCall)
    assert calls[0].options.echo and calls[0].params == SamplingParams()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"max_tokens": np.array([[1.0]], np.float32)}, "max_tokens must be of type INT32"),
        ({"max_tokens": np.array([[1, 2]], np.int32)}, "max_tokens must be a single value > 0"),
        ({"max_tokens": np.array([1], np.int32)}, r"max_tokens must have shape \[batch, 1\]"),
        ({"max_tokens": np.zeros((1, 0), np.int32)}, "max_tokens must be a single value"),
        ({"max_tokens": np.array(1, np.int32)}, "max_tokens must be a single value"),
        ({"stop_words": np.array([b"x"], dtype=object)}, r"stop_words must have shape \[batch, n"),
        ({"text_input": np.array([[b"\xff"]], dtype=object)}, "text_input is not UTF-8"),
        ({"nonsense": np.array([[1]])}, "unknown input 'nonsense'"),
        ({"input_lengths": np.array([[2]], np.int32)}, None),
    ],
)
def test_tensors_of_the_wrong_kind(tensors: dict[str, Any], message: str | None) -> None:
    given = {"text_input": np.array([[b"hi"]], dtype=object)} | tensors
    if message is None:
        protocol.parse(given, {}, "", TRTLLM)
        return
    with pytest.raises(RequestError, match=message):
        protocol.parse(given, {}, "", TRTLLM)


def test_limits_name_themselves() -> None:
    small = WireSettings(limits=Limits(prompt_bytes=4, rows=1))
    assert "5 bytes long, more than the limit of 4" in refusal(small, text_input="aaaaa").message
    assert "6 bytes" in refusal(small, text_input="漢字").message
    with pytest.raises(RequestError, match="1 rows at most, got 2"):
        protocol.parse({"text_input": np.full((2, 1), b"a", dtype=object)}, {}, "", small)


def test_who_asks() -> None:
    found = call(parameters={"llm_priority": 2, "user": "u", "cache_salt": "s", "deadline_ms": 5})
    assert (found.priority, found.tenant, found.cache_salt) == (2, "u", "s")
    assert found.deadline_ms == 5.0
