"""Hands a request on to the decoupled `llm`, and hands its one response back.

Unary gRPC and HTTP /infer refuse a decoupled model; this one they take. It holds no engine: up to
`CONCURRENCY` requests run in `llm` at once, and further ones wait in this model's Triton queue.
"""

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# The Python backend serves as many calls between models at once (its option thread-pool-size).
CONCURRENCY = 32
CANCELLATION_CHECK_SECONDS = 0.1


class Reply:
    """The way back to one client; no other response may follow ``send``.

    To ask a sender about cancellation once it has sent its final response crashes tritonserver
    24.10, hence the lock.
    """

    def __init__(self, request: Any) -> None:
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._sent = False

    def send(self, response: Any) -> None:
        with self._lock:
            self._sent = True
            self._sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._sent and bool(self._sender.is_cancelled())


class TritonPythonModel:
    """Adds the batch dimension of `llm` on the way in and takes it off on the way out."""

    def initialize(self, args: Mapping[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._model = parameters["model"]["string_value"]
        self._batched = parameters["batched"]["string_value"] == "true"
        self._ids = itertools.count(1)
        self._open: dict[str, Reply] = {}
        self._free = threading.BoundedSemaphore(CONCURRENCY)
        self._workers = ThreadPoolExecutor(CONCURRENCY)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cancellation")
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._free.acquire()
            reply = Reply(request)
            try:
                # `llm` stops a request by its id, so that each needs one of its own.
                name = f"{request.request_id()}#{next(self._ids)}"
                call = self._call(request, name)
            except Exception as error:  # out of `execute` it would fail the others of the call
                reply.send(_unreadable(error))
                self._free.release()
                continue
            self._open[name] = reply
            self._workers.submit(self._relay, call, name, reply)

    def finalize(self) -> None:
        self._closing.set()
        self._watcher.join()
        self._workers.shutdown()

    def _call(self, request: Any, name: str) -> Any:
        """The same request for `llm`. Triton hands on no float as a parameter, but its text."""
        parameters = json.loads(request.parameters() or "{}")
        texts = {key: repr(value) for key, value in parameters.items() if isinstance(value, float)}
        return pb_utils.InferenceRequest(
            model_name=self._model,
            request_id=name,
            requested_output_names=list(request.requested_output_names()),
            inputs=[_mapped(tensor, self._add_batch) for tensor in request.inputs()],
            parameters={**parameters, **texts, "chairlift_relay": True},
            timeout=request.timeout(),
        )

    def _relay(self, call: Any, name: str, reply: Reply) -> None:
        try:
            if any(t.name() == "stream" and t.as_numpy().any() for t in call.inputs()):
                text = f"stream is not supported here: use {self._model}"
                response = _failure(text, pb_utils.TritonError.UNSUPPORTED)
            else:
                response = self._answer(call.exec(decoupled=True))
        except Exception as error:  # the client must hear of it, whatever it was
            response = _failure(f"relay failed: {error}", pb_utils.TritonError.INTERNAL)
        del self._open[name]
        reply.send(response)
        self._free.release()

    def _answer(self, responses: Iterator[Any]) -> Any:
        """The one response with content; what may follow is an empty final one."""
        answer = _failure("no response", pb_utils.TritonError.INTERNAL)
        for response in responses:
            if response.has_error():
                answer = _coded(response.error().message())
            elif response.output_tensors():
                tensors = [self._stripped(tensor) for tensor in response.output_tensors()]
                answer = pb_utils.InferenceResponse(output_tensors=tensors)
        return answer

    def _add_batch(self, array: Any) -> Any:
        return array[np.newaxis] if self._batched else array

    def _stripped(self, tensor: Any) -> Any:
        """Without the batch dimension, which text_output never has."""
        if not self._batched or tensor.name() == "text_output":
            return tensor
        return _mapped(tensor, lambda array: array[0])

    def _watch(self) -> None:
        """Stop the requests whose clients have cancelled; a call between models cannot be."""
        while not self._closing.wait(CANCELLATION_CHECK_SECONDS):
            for name, reply in list(self._open.items()):
                if reply.is_cancelled():
                    self._stop(name)

    def _stop(self, name: str) -> None:
        stop = self._add_batch(np.array([True]))
        call = pb_utils.InferenceRequest(
            model_name=self._model,
            request_id=name,
            requested_output_names=["text_output"],
            inputs=[pb_utils.Tensor("stop", stop)],
        )
        for _ in call.exec(decoupled=True):
            pass


def _mapped(tensor: Any, change: Callable[[Any], Any]) -> Any:
    return pb_utils.Tensor(tensor.name(), change(tensor.as_numpy()))


def _failure(text: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


def _unreadable(error: Exception) -> Any:
    """Bytes that are no text, or no JSON, are the client's mistake; anything else is ours."""
    codes = pb_utils.TritonError
    code = codes.INVALID_ARG if isinstance(error, ValueError) else codes.INTERNAL
    return _failure(f"the request could not be read: {error}", code)


def _coded(text: str) -> Any:
    """Triton hands on the message of `llm` but not its code, so `llm` writes it in front."""
    found = re.fullmatch(r"\[([A-Z_]+)\] (.*)", text, re.DOTALL)
    if found:
        return _failure(found[2], getattr(pb_utils.TritonError, found[1]))
    # Without a code it comes from Triton's own queue: full, or timed out.
    return _failure(text, pb_utils.TritonError.UNAVAILABLE)
