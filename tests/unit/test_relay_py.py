"""The relay without tritonserver: what can't be handed on is answered, and harms nobody else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

MODEL = Path(__file__).resolve().parents[2] / "model_repository/llm_infer/1/model.py"
CODES = {"INTERNAL": "INTERNAL", "INVALID_ARG": "INVALID_ARG"}
CONFIG = {"parameters": {"model": {"string_value": "llm"}, "batched": {"string_value": "true"}}}


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class Request:
    """A client's, and its own sender; to ask a closed one about cancellation ends tritonserver."""

    def __init__(self, parameters: str) -> None:
        self.parameters = lambda: parameters
        self.sent: list[Any] = []
        self.request_id = self.requested_output_names = lambda: ""
        self.timeout = lambda: 0
        self.inputs = lambda: [Tensor("text_input", np.array([b"x"], dtype=np.object_))]
        self.get_response_sender = lambda: self

    def send(self, response: Any, flags: int) -> None:
        self.sent.append(response)

    def is_cancelled(self) -> bool:
        assert not self.sent, "signal 11"
        return False


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The parameters of each call to `llm`, whose answer is one text."""
    made: list[dict[str, Any]] = []
    answer = SimpleNamespace(
        has_error=lambda: False,
        output_tensors=lambda: [Tensor("text_output", np.array([b"answer"], dtype=np.object_))],
    )

    def call(**fields: Any) -> SimpleNamespace:
        made.append(fields["parameters"])
        return SimpleNamespace(
            inputs=lambda: fields["inputs"], exec=lambda decoupled: iter([answer])
        )

    stub = SimpleNamespace(
        InferenceRequest=call,
        InferenceResponse=SimpleNamespace,
        Tensor=Tensor,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        TritonError=type("TritonError", (SimpleNamespace,), {**CODES, "__init__": _error}),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)  # type: ignore[arg-type]
    return made


def _error(self: Any, text: str, code: str) -> None:
    self.text, self.code = text, code


def relay() -> Any:
    spec = importlib.util.spec_from_file_location("relay_under_test", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps(CONFIG)})
    return model


def test_what_cannot_be_read_is_answered_and_the_others_are_served(
    calls: list[dict[str, Any]],
) -> None:
    model = relay()
    bad, good = Request("{"), Request('{"temperature": 0.5, "max_tokens": 3}')
    model.execute([bad, good])
    model.finalize()
    assert [answer.error.code for answer in bad.sent] == ["INVALID_ARG"]
    assert bad.sent[0].error.text.startswith("the request could not be read: ")
    assert good.sent[0].output_tensors[0].as_numpy().tolist() == [b"answer"]
    assert calls == [{"temperature": "0.5", "max_tokens": 3, "chairlift_relay": True}]
    assert model._open == {}


@pytest.mark.parametrize("field", ["request_id", "parameters", "inputs", "timeout"])
def test_R6_a_request_that_cannot_be_read_costs_no_place(
    calls: list[dict[str, Any]], field: str
) -> None:
    def broken() -> Any:
        raise MemoryError("no shared memory")

    model = relay()
    bad, good = [Request("{}") for _ in range(40)], Request("{}")  # more than run at once
    for each in bad:
        setattr(each, field, broken)
    model.execute([*bad, good])
    model.finalize()
    assert [[answer.error.code for answer in each.sent] for each in bad] == [["INTERNAL"]] * 40
    assert good.sent[0].output_tensors[0].as_numpy().tolist() == [b"answer"]
