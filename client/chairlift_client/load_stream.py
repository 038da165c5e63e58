"""One gRPC stream that carries many requests, and tells which of them an error belongs to.

tritonclient's own stream hands an error over without the request's id, which Triton does send; with
one request per stream that does not matter, here it does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import InferInput, service_pb2, service_pb2_grpc

OnResponse = Callable[[Any], None]
OnBroken = Callable[[str], None]

WANTS_FINAL = "triton_enable_empty_final_response"


class LoadStream:
    """Requests go in from any thread; ``on_response`` gets each ModelStreamInferResponse in the
    stream's own thread, and ``on_broken`` the reason when the stream ends before `close`."""

    def __init__(
        self,
        address: str,
        options: list[tuple[str, int]],
        on_response: OnResponse,
        on_broken: OnBroken,
    ) -> None:
        self._channel = grpc.insecure_channel(address, options=options)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None))
        self._on_response = on_response
        self._on_broken = on_broken
        self._thread = threading.Thread(target=self._read, name="load-stream", daemon=True)
        self._thread.start()

    def send(self, request: Any) -> None:
        """Queue a ModelInferRequest."""
        self._requests.put(request)

    def close(self, *, cancel: bool) -> None:
        """End the stream, with what still runs on it if asked to, and wait for its thread."""
        self._requests.put(None)
        if cancel:
            self._call.cancel()
        self._thread.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._on_response(response)
        except grpc.RpcError as error:
            self._on_broken(str(error.details()))


def infer_request(
    model: str,
    request_id: str,
    tensors: list[InferInput],
    parameters: Mapping[str, object],
) -> Any:
    """The protocol's message for one request; the protocol has no numbers with a fraction, so those
    travel as text, which servers read as numbers."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for each in tensors:
        request.inputs.append(each._get_tensor())
        request.raw_input_contents.append(each._get_content())
    for name, value in {**parameters, WANTS_FINAL: True}.items():
        if isinstance(value, bool):
            request.parameters[name].bool_param = value
        elif isinstance(value, int):
            request.parameters[name].int64_param = value
        else:
            request.parameters[name].string_param = str(value)
    return request
