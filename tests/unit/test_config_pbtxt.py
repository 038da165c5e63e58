"""What the config files declare is what the code reads and writes, in every variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from chairlift import protocol
from chairlift.calls import OutputOptions, StopCall, WireSettings
from chairlift.config import EngineConfig
from chairlift.errors import ErrorCode, RequestError
from chairlift.request import FinishReason, TokenLogprobs
from chairlift.responses import OUTPUTS, RequestFacts, SequenceDelta, encode, output_type
from chairlift.tensors import INPUTS, NUMPY_TYPES

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"
LLM = ("llm/config.pbtxt", "llm/configs/dynamic.pbtxt", "llm/configs/static.pbtxt")
QUEUE = "llm/configs/triton_queue.pbtxt"
VLLM = "llm/configs/vllm.pbtxt"
ENSEMBLES = {"vllm_model/config.pbtxt": LLM[0], "vllm_model/configs/vllm.pbtxt": VLLM}
RELAYS = {"llm_infer/config.pbtxt": LLM[0], "llm_infer/configs/vllm.pbtxt": VLLM}
VLLM_INPUTS = (
    "text_input image stream sampling_parameters exclude_input_in_output return_finish_reason "
    "return_cumulative_logprob return_logprobs return_num_input_tokens return_num_output_tokens "
    "embedding_request"
)
Declared = dict[str, tuple[str, tuple[int, ...]]]


def load(name: str) -> Any:
    """A config as tritonserver reads it; a misspelt field is an error."""
    text = (REPOSITORY / name).read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def declared(tensors: Any) -> Declared:
    kinds = model_config_pb2.DataType
    return {t.name: (kinds.Name(t.data_type)[len("TYPE_") :], tuple(t.dims)) for t in tensors}


def parameters(config: Any) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def inputs_in_code(batched: bool) -> Declared:
    return {
        name: (spec.datatype, (-1,) if spec.many else (1,))
        for name, spec in INPUTS.items()
        if batched or name != "vllm_text_input"
    }


def outputs_in_code(batched: bool) -> Declared:
    return {n: (output_type(n, batched=batched), spec.dims) for n, spec in OUTPUTS.items()}


@pytest.mark.parametrize("name", [*LLM, QUEUE, VLLM])
def test_llm_declares_what_the_code_reads_and_writes(name: str) -> None:
    config = load(name)
    batched = config.max_batch_size > 0
    assert batched == (name != VLLM)
    assert declared(config.input) == inputs_in_code(batched)
    assert declared(config.output) == outputs_in_code(batched)
    assert all(tensor.optional for tensor in config.input)
    assert config.output[0].name == "text_output"


@pytest.mark.parametrize("name", [*LLM, QUEUE, VLLM])
def test_llm_is_one_decoupled_instance(name: str) -> None:
    config = load(name)
    assert config.backend == "python"
    assert config.model_transaction_policy.decoupled
    kinds = model_config_pb2.ModelInstanceGroup
    assert [(g.count, g.kind) for g in config.instance_group] == [(1, kinds.KIND_MODEL)]


@pytest.mark.parametrize("name", [*LLM, VLLM])
def test_tritons_batcher_may_hand_over_while_a_call_is_being_taken(name: str) -> None:
    """With any of these it may not, and sleeps up to 500 ms over what came meanwhile."""
    batching = load(name).dynamic_batching
    assert batching.priority_levels == 0
    assert not batching.HasField("default_queue_policy")
    assert not batching.priority_queue_policy


def test_tritons_queue_has_limits_and_the_engine_leaves_requests_in_it() -> None:
    config = load(QUEUE)
    policy = config.dynamic_batching.default_queue_policy
    assert policy.allow_timeout_override
    assert policy.default_timeout_microseconds > 0  # else a request's own timeout has no effect
    assert policy.max_queue_size > 0
    assert config.dynamic_batching.priority_levels > 1
    assert EngineConfig.model_validate(parameters(config)).when_full == "block"


def test_tritons_queue_differs_in_the_queue_alone() -> None:
    rest = []
    for name in (LLM[0], QUEUE):
        config = load(name)
        config.parameters.pop("when_full", None)
        config.max_batch_size = 0
        config.ClearField("dynamic_batching")
        rest.append(config)
    assert rest[0] == rest[1]


def test_the_batching_variants_differ_in_the_batching_alone() -> None:
    rest = []
    for name, batching in zip(LLM, ("continuous", "dynamic", "static"), strict=True):
        config = load(name)
        assert parameters(config)["batching"] == batching
        config.parameters["batching"].string_value = ""
        config.max_batch_size = 0  # a batch in the other two, a delivery in the continuous one
        config.dynamic_batching.ClearField("preferred_batch_size")
        config.dynamic_batching.ClearField("max_queue_delay_microseconds")
        rest.append(config)
    assert rest[0] == rest[1] == rest[2]


@pytest.mark.parametrize("name", [*LLM, QUEUE, VLLM])
def test_parameters_are_settings_with_their_defaults(name: str) -> None:
    """L6: the default of max_tokens can be read in the model's config."""
    given = parameters(load(name))
    assert set(given) <= set(EngineConfig.model_fields)
    assert int(given["default_max_tokens"]) == EngineConfig().default_max_tokens
    assert WireSettings().default_max_tokens == EngineConfig().default_max_tokens
    assert given.get("dialect", "trtllm") == ("vllm" if name == VLLM else "trtllm")


@pytest.mark.parametrize(("name", "llm"), ENSEMBLES.items())
def test_vllm_model_maps_vllms_tensors_to_llm(name: str, llm: str) -> None:
    config, step_config = load(name), load(llm)
    assert (config.platform, config.max_batch_size) == ("ensemble", 0)
    (step,) = config.ensemble_scheduling.step
    assert step.model_name == "llm"
    inputs, outputs = declared(config.input), declared(config.output)
    assert set(inputs) == set(VLLM_INPUTS.split())
    assert {v: inputs[v] for v in step.input_map.values()} == inputs
    theirs = declared(step_config.input)
    assert all(theirs[key] == inputs[value] for key, value in step.input_map.items())
    theirs = declared(step_config.output)
    assert all(theirs[key] == outputs[value] for key, value in step.output_map.items())
    assert set(step.output_map.values()) == set(outputs)
    assert ("vllm_text_input" in step.input_map) == (step_config.max_batch_size > 0)


@pytest.mark.parametrize(("name", "llm"), RELAYS.items())
def test_llm_infer_takes_what_llm_takes_and_is_not_decoupled(name: str, llm: str) -> None:
    config, relayed = load(name), load(llm)
    assert config.max_batch_size == 0
    assert not config.model_transaction_policy.decoupled
    assert parameters(config) == {
        "model": "llm",
        "batched": str(relayed.max_batch_size > 0).lower(),
    }
    theirs = declared(relayed.input)
    own = {name: kind for name, kind in theirs.items() if name not in ("stop", "vllm_text_input")}
    assert declared(config.input) == own
    assert declared(config.output) == declared(relayed.output)


NEUTRAL: dict[str, Any] = {
    "STRING": b"1",
    "BOOL": True,
    "INT32": 1,
    "UINT64": 1,
    "FP32": 0.5,
}
PROMPTS = ("text_input", "vllm_text_input", "messages", "input_ids", "input_lengths")


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("name", sorted(set(INPUTS) - set(PROMPTS)))
def test_every_declared_input_is_read_or_refused_by_name(name: str, batched: bool) -> None:
    spec = INPUTS[name]
    value = b"{}" if name == "sampling_parameters" else NEUTRAL[spec.datatype]
    shape = (1, 1) if batched else (1,)
    tensors = {
        "text_input": np.full(shape, b"hello", dtype=object),
        name: np.full(shape, value, dtype=NUMPY_TYPES[spec.datatype]),
    }
    try:
        parsed = protocol.parse(tensors, {}, "id", WireSettings(batched=batched))
    except RequestError as error:
        assert error.code is ErrorCode.UNSUPPORTED
        assert name in error.message or name == "embedding_request"
    else:
        assert isinstance(parsed, StopCall) == (name == "stop")


@pytest.mark.parametrize("batched", [True, False])
def test_every_output_comes_with_the_declared_type_and_rank(batched: bool) -> None:
    logprobs = (TokenLogprobs(-0.5, 1, ((7, -0.5),)),) * 2
    delta = SequenceDelta("text", (7, 7), FinishReason.STOP, 0, -1.0, logprobs)
    facts = RequestFacts(2, 0, "", (1, 7), (None, logprobs[0]), *range(3), *range(4))
    options = OutputOptions(outputs=tuple(OUTPUTS), logprobs_asked=True)
    tensors = encode([delta], lambda: facts, options, WireSettings(batched=batched), str)
    assert list(tensors) == list(OUTPUTS)
    for name, array in tensors.items():
        datatype, dims = outputs_in_code(batched)[name]
        assert array.dtype == NUMPY_TYPES[datatype], name
        leading = batched and name != "text_output"
        shape = array.shape[1:] if leading else array.shape
        assert len(shape) == len(dims), name
        assert all(want in (-1, size) for want, size in zip(dims, shape, strict=True)), name
        assert not leading or array.shape[0] == 1
