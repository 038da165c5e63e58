"""Requests of every malformed kind get one clear error or a sound reading, and nothing else.

CI runs a few hundred; ``CHAIRLIFT_FUZZ_EXAMPLES=20000`` runs as many as that.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift import protocol
from chairlift.calls import GenerateCall, StopCall, WireSettings
from chairlift.errors import ErrorCode, RequestError
from chairlift.prompts import PromptProcessor
from chairlift.request import FinishReason, SamplingParams, TokenLogprobs
from chairlift.responses import OUTPUTS, RequestFacts, SequenceDelta, encode
from chairlift.tensors import INPUTS
from tests.unit import tokenizer_harness as harness
from tests.unit.malformed import JSON_VALUES, NAMES, SCALARS, tensors

EXAMPLES = int(os.environ.get("CHAIRLIFT_FUZZ_EXAMPLES", "400"))
MAX_MODEL_LEN = 64
VOCAB_SIZE = 720


@st.composite
def requests(draw: st.DrawFn) -> tuple[WireSettings, dict[str, Any], dict[str, Any]]:
    wire = WireSettings(
        dialect=draw(st.sampled_from(["trtllm", "vllm"])),
        batched=draw(st.booleans()),
        default_sampling=draw(st.sampled_from(["dialect", "greedy", "random"])),
    )
    prompt = draw(st.sampled_from(["text_input", "text_input", "messages", "input_ids", ""]))
    names = draw(st.lists(st.sampled_from([*INPUTS, "nonsense"]), max_size=4, unique=True))
    inputs = {n: draw(tensors(n, wire.batched)) for n in dict.fromkeys([prompt, *names]) if n}
    parameters = draw(st.dictionaries(NAMES, SCALARS | JSON_VALUES, max_size=4))
    return wire, inputs, parameters


@cache
def processor() -> PromptProcessor:
    return PromptProcessor(
        harness.byte_level(), None, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE
    )


def check_error(error: RequestError) -> None:
    assert error.code in (ErrorCode.INVALID_ARG, ErrorCode.UNSUPPORTED)
    assert 0 < len(error.message) < 600
    error.message.encode()


def check_params(params: SamplingParams) -> None:
    assert params.min_tokens >= 0
    assert 1 <= params.max_tokens < 2**63
    assert params.temperature == 0.0 or 1e-4 < params.temperature <= 1e4
    assert 0 <= params.top_k < 2**63
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert params.seed is None or -(2**63) <= params.seed < 2**63
    assert params.repetition_penalty > 0
    assert abs(params.presence_penalty) <= 2 and abs(params.frequency_penalty) <= 2
    assert all(0 <= i < 2**31 and abs(bias) <= 100 for i, bias in params.logit_bias)
    assert all(params.stop) and all(params.bad_words)
    assert 1 <= params.n <= 16


def check_answer(call: GenerateCall, wire: WireSettings, text: str) -> None:
    """A response to the call can be made, of declared outputs only."""
    logprobs = (TokenLogprobs(-1.0, 1, ()),) * 2
    deltas = [
        SequenceDelta("é", (1, 2), FinishReason.STOP, index, -1.0, logprobs)
        for index in range(call.params.n if call.options.grouped else 1)
    ]
    facts = RequestFacts(3, call.batch_index, text)
    found = encode(deltas, lambda: facts, call.options, wire, str)
    assert next(iter(found)) == "text_output"
    assert found.keys() <= OUTPUTS.keys()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(request=requests(), request_id=st.sampled_from(["", "7"]))
def test_a_clear_error_or_a_sound_reading(
    request: tuple[WireSettings, dict[str, Any], dict[str, Any]], request_id: str
) -> None:
    wire, inputs, parameters = request
    try:
        calls = protocol.parse(inputs, parameters, request_id, wire)
    except RequestError as error:
        check_error(error)
        return
    if isinstance(calls, StopCall):
        assert calls.request_id == "7"
        return
    assert calls
    for call in calls:
        check_params(call.params)
        try:
            prepared = processor().prepare(call)
        except RequestError as error:
            check_error(call.error(error))
            continue
        check_params(prepared.params)
        assert 1 <= len(prepared.token_ids) < MAX_MODEL_LEN
        assert len(prepared.token_ids) + prepared.params.max_tokens <= MAX_MODEL_LEN
        assert all(0 <= token_id < VOCAB_SIZE for token_id in prepared.token_ids)
        check_answer(call, wire, prepared.text)
