"""The Triton side without tritonserver: instances, metric families, responses after the last."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from chairlift.answers import Responder
from chairlift.errors import RequestError
from chairlift.metric_names import Kind
from chairlift.metrics import MetricBook
from chairlift.service import Arrival
from chairlift_client.scrape import Scrape
from tests.unit.metrics_harness import FakeSink

MODEL = Path(__file__).resolve().parents[2] / "model_repository/llm/1/model.py"


class FamilyStub:
    """pb_utils.MetricFamily over the fake sink; a family that is collected takes its series."""

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    sink = FakeSink()
    alive: set[str] = set()

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert name not in self.alive, f"{name} is registered twice"
        self.name, self.kind = name, Kind(kind)
        self.alive.add(name)

    def __del__(self) -> None:
        self.alive.discard(self.name)

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Any:  # noqa: N802
        assert (buckets is not None) == (self.kind is Kind.HISTOGRAM)
        return self.sink.series(self.name, self.kind, "", labels, buckets or ())


class TritonErrorStub(NamedTuple):
    text: str
    code: str
    INVALID_ARG = "INVALID_ARG"
    INTERNAL = "INTERNAL"


class RequestStub:
    """A client's request and its own sender; ``broken`` is the one thing that can't be read."""

    def __init__(self, broken: str = "", error: Exception | None = None) -> None:
        self.sent: list[tuple[str, int]] = []
        tensor = SimpleNamespace(name=lambda: "max_tokens", as_numpy=lambda: np.array([[3]]))
        fields: dict[str, Any] = {
            "request_id": "7",
            "parameters": '{"tenant": "a"}',
            "inputs": [tensor],
            "timeout": 0,
            "requested_output_names": ["text_output"],
        }
        for name, value in fields.items():
            setattr(self, name, partial(self._read, value, error if name == broken else None))

    def _read(self, value: Any, error: Exception | None) -> Any:
        if error is not None:
            raise error
        return value

    def get_response_sender(self) -> Any:
        return SimpleNamespace(
            send=lambda response, flags: self.sent.append((response.error.code, flags))
        )


class ServiceStub:
    """What reaches the service, and what it is told to refuse."""

    def __init__(self) -> None:
        self.calls: list[list[Arrival]] = []

    def take(self, arrivals: list[Arrival]) -> None:
        self.calls.append(arrivals)

    def refuse(self, responder: Responder, error: RequestError) -> None:
        responder.fail(error, final=True)


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    FamilyStub.sink, FamilyStub.alive = FakeSink(), set()
    stub = SimpleNamespace(
        MetricFamily=FamilyStub,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Tensor=lambda name, array: (name, array),
        InferenceResponse=SimpleNamespace,
        TritonError=TritonErrorStub,
        Logger=SimpleNamespace(),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", stub)  # type: ignore[arg-type]
    return stub


@pytest.fixture
def model(pb_utils: SimpleNamespace) -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_under_test", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("groups", "refused"),
    [
        ([], None),
        ([{"kind": "KIND_MODEL", "count": 1}], None),
        ([{"kind": "KIND_MODEL", "count": 2}], "asks for 2 instances"),
        ([{"kind": "KIND_MODEL", "count": 1}, {"kind": "KIND_MODEL", "count": 1}], "2 instances"),
        ([{"kind": "KIND_GPU", "count": 1, "gpus": [0]}], "KIND_GPU"),
        ([{"kind": "KIND_CPU", "count": 1}], "KIND_CPU"),
    ],
)
def test_H8_more_than_one_instance_is_refused_with_the_reason(
    model: ModuleType, groups: list[dict[str, object]], refused: str | None
) -> None:
    """Each instance would be a process with weights and a KV pool of its own."""
    if refused is None:
        model._refuse_instances({"instance_group": groups})
        return
    with pytest.raises(ValueError, match=refused) as caught:
        model._refuse_instances({"instance_group": groups})
    assert "run a server per device" in str(caught.value)


def test_H4_families_are_made_once_and_live_as_long_as_the_model(model: ModuleType) -> None:
    sink = model.TritonMetrics()
    assert sink.has_histograms
    book = MetricBook(sink, {"model": "llm", "version": "1"})
    book.push()
    assert "vllm:request_success_total" in FamilyStub.alive
    shown = Scrape(FamilyStub.sink.text(), 0.0, "llm")
    assert "vllm:time_to_first_token_seconds_bucket" in shown.names
    del book, sink
    assert not FamilyStub.alive


def test_servers_without_histograms_are_noticed(
    model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FamilyStub, "HISTOGRAM")
    assert not model.TritonMetrics().has_histograms


def test_a_client_is_not_asked_about_once_it_has_had_its_last_response(model: ModuleType) -> None:
    sent: list[int] = []
    sender = SimpleNamespace(
        send=lambda response, flags: sent.append(flags), is_cancelled=lambda: True
    )
    responder = model.TritonResponder(SimpleNamespace(get_response_sender=lambda: sender))
    responder.send({}, final=False)
    assert responder.is_cancelled()
    responder.send({}, final=True)
    assert not responder.is_cancelled()
    assert sent == [0, 1]


@pytest.mark.parametrize("broken", ["request_id", "parameters", "inputs", "timeout"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "INVALID_ARG"),
        (MemoryError("no shared memory"), "INTERNAL"),
    ],
)
def test_R6_a_request_that_cannot_be_read_fails_alone(
    model: ModuleType, broken: str, error: Exception, code: str
) -> None:
    triton = model.TritonPythonModel()
    triton._service = service = ServiceStub()
    bad, good = RequestStub(broken, error), [RequestStub(), RequestStub()]
    triton.execute([good[0], bad, good[1]])
    assert bad.sent == [(code, 1)]
    (arrivals,) = service.calls
    assert [arrival.parameters for arrival in arrivals] == [{"tenant": "a"}] * 2
    assert not any(each.sent for each in good)
