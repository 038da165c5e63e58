"""The Triton side: tensors in, tensors out. Nothing else in Chairlift knows tritonserver."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from chairlift.calls import Limits, WireSettings
from chairlift.config import EngineConfig, load_config
from chairlift.errors import ErrorCode, RequestError
from chairlift.metric_names import Kind
from chairlift.metrics import Series
from chairlift.request_log import JsonLines
from chairlift.service import Arrival, Service


class LogToTriton(logging.Handler):
    """Sends the engine's log lines to tritonserver's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


class TritonResponder:
    """One client's response sender. Holds nothing else of the request, whose tensors are copied.

    A lock keeps ``is_cancelled`` and FINAL apart: asking about a request that is just being closed
    reads freed memory in tritonserver and takes it down [seen in 24.10, signal 11].
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, outputs: Mapping[str, np.ndarray[Any, Any]], *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        self._send(pb_utils.InferenceResponse(output_tensors=tensors), final)

    def fail(self, error: RequestError, *, final: bool) -> None:
        code = getattr(pb_utils.TritonError, error.code.value)
        triton_error = pb_utils.TritonError(error.message, code)
        self._send(pb_utils.InferenceResponse(error=triton_error), final)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())

    def _send(self, response: Any, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        with self._lock:
            self._closed = final
            self._sender.send(response, flags)


class TritonMetrics:
    """tritonserver's /metrics. All families are kept: one let go of takes its series with it.

    Calls that cannot work must not be made: asking a histogram for its value, or incrementing it,
    ends the server of 24.10 [seen: lock_exception, signal 6].
    """

    def __init__(self) -> None:
        self.has_histograms = hasattr(pb_utils.MetricFamily, "HISTOGRAM")
        self._families: dict[str, Any] = {}

    def series(
        self, name: str, kind: Kind, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Series:
        family = self._families.get(name)
        if family is None:
            number = getattr(pb_utils.MetricFamily, kind.name)
            family = pb_utils.MetricFamily(name=name, description=help, kind=number)
            self._families[name] = family
        extra = {"buckets": list(buckets)} if kind is Kind.HISTOGRAM else {}
        metric: Series = family.Metric(labels=dict(labels), **extra)
        return metric


class TritonPythonModel:
    """What tritonserver calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        variant = _variant(model_config)
        config = load_config(folder / "model.json", os.environ.get("CHAIRLIFT_SETTINGS"), variant)
        _refuse_instances(model_config)
        _start_log(config)
        control = os.environ.get("CHAIRLIFT_CONTROL_DIR")
        self._service = Service(
            config,
            _wire(config, model_config, args["model_name"]),
            sink=TritonMetrics(),
            labels={"model": args["model_name"], "version": args["model_version"]},
            control_dir=Path(control) if control else None,
        )
        # What is there now stays: a full collection would look at 390,000 objects, mostly
        # transformers', and hold up the thread it happens in for 150 ms.
        gc.collect()
        gc.freeze()
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        """Parse, submit, and return; responses come from the output thread."""
        arrivals = []
        for request in requests:
            responder = TritonResponder(request)
            try:
                arrivals.append(_arrival(request, responder))
            except Exception as error:  # out of `execute` it would fail the others of the call
                self._service.refuse(responder, _unreadable(error))
        self._service.take(arrivals)

    def is_ready(self) -> bool:
        return self._service.ready

    def finalize(self) -> None:
        self._service.close()


def _arrival(request: Any, responder: TritonResponder) -> Arrival:
    """Copies the tensors: the shared memory behind them is Triton's again after ``execute``."""
    inputs = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
    return Arrival(
        inputs=inputs,
        parameters=json.loads(request.parameters() or "{}"),
        request_id=request.request_id(),
        timeout_us=request.timeout(),
        requested=request.requested_output_names(),
        responder=responder,
    )


def _unreadable(error: Exception) -> RequestError:
    """Bytes that are no text, or no JSON, are the client's mistake; anything else is ours."""
    code = ErrorCode.INVALID_ARG if isinstance(error, ValueError) else ErrorCode.INTERNAL
    return RequestError(f"the request could not be read: {error}", code)


def _variant(model_config: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of config.pbtxt; the variants under configs/ differ in them."""
    parameters = model_config.get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}


def _wire(config: EngineConfig, model_config: Mapping[str, Any], name: str) -> WireSettings:
    return WireSettings(
        dialect=config.dialect,
        batched=model_config["max_batch_size"] > 0,
        model_name=name,
        default_max_tokens=config.default_max_tokens,
        default_sampling=config.default_sampling,
        stream_interval=config.stream_interval,
        limits=Limits(**config.limits),
    )


def _refuse_instances(model_config: Mapping[str, Any]) -> None:
    """Every instance would be a process with a model and a KV pool of its own."""
    groups = model_config.get("instance_group", [])
    count = sum(group.get("count", 1) for group in groups)
    kinds = {group.get("kind", "KIND_MODEL") for group in groups}
    if count > 1 or kinds - {"KIND_MODEL"}:
        raise ValueError(
            f"instance_group asks for {count} instances of {sorted(kinds)}; Chairlift serves one "
            "of KIND_MODEL: a second would load the weights again and could share neither KV cache "
            "nor batch. The setting 'device' names its device; run a server per device for several"
        )


def _start_log(config: EngineConfig) -> None:
    """Lines go to tritonserver's log, or as bare JSON to the same stream: no prefix before it."""
    handler: logging.Handler = LogToTriton()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    if config.log_format == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
    logger = logging.getLogger("chairlift")
    logger.handlers = [handler]
    logger.setLevel(config.log_level.upper())
    logger.propagate = False
