"""Requests for the tests of the protocol, written briefly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from chairlift import protocol
from chairlift.calls import (
    GenerateCall,
    StopCall,
    WireSettings,
)
from chairlift.errors import RequestError
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
