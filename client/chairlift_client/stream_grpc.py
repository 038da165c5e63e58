"""One request over a gRPC stream: tensors shaped by the model's own metadata."""

import json
import queue
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import numpy as np
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from chairlift_client.errors import GenerateError
from chairlift_client.stream import Chunk, Endpoint, Query, Value

METADATA_TIMEOUT_SECONDS = 10.0
REASON_SECONDS = 1.0
# Channels of one process share their connections unless told otherwise, so a call made while a
# server restarts would make the next ones wait, for up to two minutes, though it is back.
CHANNEL_ARGUMENTS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
)


class _Answer(NamedTuple):
    result: Any
    error: Exception | None


class TensorSpec(NamedTuple):
    """An input's dtype in Triton's words and its number of dimensions, batch included."""

    dtype: str
    rank: int


def grpc_chunks(endpoint: Endpoint, query: Query) -> Generator[Chunk, None, None]:
    """Yield the responses of one request; closing it cancels the request and the stream.

    Raises GenerateError for a refusal, a broken connection or a timeout.
    """
    deadline = None if query.timeout is None else time.monotonic() + query.timeout
    client = grpc.InferenceServerClient(
        f"{endpoint.host}:{endpoint.port}", channel_args=list(CHANNEL_ARGUMENTS)
    )
    answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
    finished = False
    try:
        specs = _input_specs(client, query.model, query.timeout)
        client.start_stream(
            callback=lambda result, error: answers.put(_Answer(result, error)),
            stream_timeout=query.timeout,
        )
        _send(client, query, specs, answers)
        while not finished:
            result = _next_result(answers, deadline, query.timeout)
            response = result.get_response()
            finished = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                yield _chunk(result)
    except InferenceServerException as error:
        # The request has ended. Cancelling a stream that is just being ended makes tritonserver
        # keep its socket and some 90 KB for good [seen in 24.10].
        finished = True
        raise GenerateError(str(error.message() or error)) from error
    finally:
        # Without this the stream's thread outlives its caller and the interpreter cannot exit.
        client.stop_stream(cancel_requests=not finished)
        client.close()


def tensor(name: str, value: Value, spec: TensorSpec) -> grpc.InferInput:
    """A value as the input a model declares: a scalar or a list, in a batch of one.

    Raises GenerateError for a value that the dtype cannot hold.
    """
    if isinstance(value, Mapping):
        value = json.dumps(value)
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    try:
        if spec.dtype == "BYTES":
            array = np.array([str(v).encode() for v in values], dtype=np.object_)
        else:
            array = np.array(values).astype(triton_to_np_dtype(spec.dtype), casting="same_kind")
            if not np.array_equal(array, np.array(values)) and spec.dtype[:2] != "FP":
                raise OverflowError
    except (TypeError, ValueError, OverflowError) as error:
        raise GenerateError(f"{name}: {value!r} is no {spec.dtype}") from error
    array = array.reshape([1] * (spec.rank - 1) + [len(values)])
    made = grpc.InferInput(name, array.shape, spec.dtype)
    made.set_data_from_numpy(array)
    return made


def _input_specs(client: Any, model: str, timeout: float | None) -> dict[str, TensorSpec]:
    limit = METADATA_TIMEOUT_SECONDS if timeout is None else timeout
    metadata = client.get_model_metadata(model, client_timeout=limit)
    return {i.name: TensorSpec(i.datatype, len(i.shape)) for i in metadata.inputs}


def _send(
    client: Any,
    query: Query,
    specs: Mapping[str, TensorSpec],
    answers: "queue.SimpleQueue[_Answer]",
) -> None:
    """Inputs the model declares go as tensors, the rest as request parameters, as over HTTP."""
    parameters = {k: v for k, v in query.inputs.items() if k not in specs}
    inputs = [tensor(k, v, specs[k]) for k, v in query.inputs.items() if k in specs]
    try:
        client.async_stream_infer(
            query.model,
            inputs,
            request_id=query.request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )
    except InferenceServerException as error:
        # Of a stream that has ended already, as by its timeout, only the callback hears why.
        try:
            reason = answers.get(timeout=REASON_SECONDS).error
        except queue.Empty:
            reason = None
        raise reason or error from None


def _next_result(
    answers: "queue.SimpleQueue[_Answer]", deadline: float | None, timeout: float | None
) -> Any:
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        answer = answers.get(timeout=left)
    except queue.Empty:
        raise GenerateError(f"no answer within {timeout} s") from None
    if answer.error is not None:
        raise answer.error
    return answer.result


def _chunk(result: Any) -> Chunk:
    outputs = {o.name: _plain(result.as_numpy(o.name)) for o in result.get_response().outputs}
    text = outputs.get("text_output", "")
    return Chunk("".join(text) if isinstance(text, list) else str(text), outputs)


def _plain(array: Any) -> object:
    """A tensor as /generate would show it: one element is a scalar, more are a list."""
    flat = [
        v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in array.ravel().tolist()
    ]
    return flat[0] if len(flat) == 1 else flat
