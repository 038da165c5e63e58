"""What a client, or the relay in front of it, hears where admitting a request raises."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from chairlift.calls import WireSettings
from chairlift.errors import ErrorCode, RequestError
from chairlift.service import Arrival, Service


class Client:
    def __init__(self) -> None:
        self.errors: list[RequestError] = []

    def send(self, outputs: Mapping[str, Any], *, final: bool) -> None:
        raise AssertionError("an answer to a refused request")

    def fail(self, error: RequestError, *, final: bool) -> None:
        assert final
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "internal error: no disk"),
        # Without the code the relay would take it for Triton's full queue: 503 in place of 500.
        ({"chairlift_relay": True}, "[INTERNAL] internal error: no disk"),
    ],
)
def test_an_internal_error_is_one_to_a_relay_too(
    monkeypatch: pytest.MonkeyPatch, parameters: dict[str, bool], message: str
) -> None:
    def no_disk(*_: object) -> None:
        raise OSError("no disk")

    monkeypatch.setattr(Service, "_admit", no_disk)
    service = Service.__new__(Service)  # without a model
    refused: list[ErrorCode] = []
    service._observed = SimpleNamespace(on_refused=refused.append)  # type: ignore[assignment]
    service._batch_ids = itertools.count()
    service._wire = WireSettings()
    client = Client()
    service._submit([Arrival({}, parameters, "7", 0, (), client)])
    (error,) = client.errors
    assert (error.message, error.code) == (message, ErrorCode.INTERNAL)
    assert refused == [ErrorCode.INTERNAL]
