"""What requests mean: prompts, rows, precedence, outputs, errors; C and P are rows of the contract
and of reported-faults.md."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from chairlift import protocol
from chairlift.calls import (
    ChatPrompt,
    Limits,
    Message,
    StopCall,
    TextPrompt,
    TokenPrompt,
    WireSettings,
)
from chairlift.errors import ErrorCode, RequestError
from chairlift.request import SamplingParams
from tests.unit.protocol_harness import TRTLLM, VLLM, by_json, call, refusal


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
    assert len(found.options.outputs) == 2 + 10
    assert call(requested=("text_output", "batch_index")).options.outputs[1:] == ("batch_index",)
    every = tuple(protocol.OUTPUTS)
    assert call(requested=every).options.outputs == ("text_output",)
    assert "prompt_logprobs" in by_json(prompt_logprobs=0).options.outputs


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
