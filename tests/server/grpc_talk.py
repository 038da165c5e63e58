"""Talking to a server through tritonclient, with tensors made from plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from tests.server.harness import ServerProcess, wait_for

UNSIGNED = ("seed", "random_seed", "lora_task_id")


def tensors(module: Any, batched: bool, **values: Any) -> list[Any]:
    """`module`'s InferInputs (tritonclient.http or .grpc): [1] each, or [1, n] where batched; a
    list of lists is one row for each."""
    made = []
    for name, value in values.items():
        array = _array(name, value)
        if batched and array.ndim == 1:
            array = array[np.newaxis]
        datatype = {"b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32", "O": "BYTES"}
        tensor = module.InferInput(name, array.shape, datatype[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def _array(name: str, value: Any) -> Any:
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind in "US":
        return np.vectorize(str.encode, otypes=[np.object_])(array)
    if name in UNSIGNED:
        return array.astype(np.uint64)
    return array.astype({"b": np.bool_, "i": np.int32, "f": np.float32}[array.dtype.kind])


def stream_infer(
    server: ServerProcess,
    model: str,
    inputs: list[Any],
    outputs: tuple[str, ...] = (),
    **options: Any,
) -> list[Any]:
    """One request over a gRPC stream: its results, or the error as the last of them."""
    got: list[Any] = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: got.append(error or result))
        wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
        client.async_stream_infer(model, inputs, outputs=wanted or None, **options)
        wait_for("the last response", lambda: got and is_last(got[-1]), 120)
        client.stop_stream()
    return got


def is_last(result: Any) -> bool:
    if not isinstance(result, grpcclient.InferResult):
        return True
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def texts(results: list[Any]) -> list[str]:
    """The text of each response that has one."""
    arrays = [result.as_numpy("text_output") for result in results]
    return [array.reshape(-1)[0].decode() for array in arrays if array is not None]
