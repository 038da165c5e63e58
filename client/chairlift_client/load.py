"""Many requests at once over few gRPC streams: the client side of every load test."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from chairlift_client.errors import GenerateError
from chairlift_client.load_stream import LoadStream, infer_request
from chairlift_client.stream import Endpoint, Value
from chairlift_client.stream_grpc import CHANNEL_ARGUMENTS, TensorSpec, tensor
from chairlift_client.timings import Arrival, Trace

METADATA_TIMEOUT_SECONDS = 10.0
COUNTS = ("return_num_output_tokens", "return_num_input_tokens")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load test: the model's inputs by name; others go as parameters."""

    inputs: Mapping[str, Value]
    parameters: Mapping[str, str | int | bool] = field(default_factory=dict)


class LoadClient:
    """Sends requests over ``num_streams`` gRPC streams and notes when their tokens arrive.

    A stream carries many requests at a time, as Triton's streams may; each has an id of its own.
    Where the model reports token counts they are asked for, else a response counts as one token.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        clock: Callable[[], float],
        *,
        num_streams: int = 1,
        extra_inputs: Mapping[str, Value] | None = None,
        on_response: Callable[[str, Any], None] | None = None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.changed = threading.Condition()
        self._model = model
        self._clock = clock
        self._extra = dict(extra_inputs or {})
        self._read_response = on_response
        self._on_ended = on_ended
        self._open: dict[str, Trace] = {}
        self._broken: str | None = None
        self._ids = count()
        address = f"{endpoint.host}:{endpoint.port}"
        self._specs = input_specs(address, model)
        self._streams = [
            LoadStream(address, list(CHANNEL_ARGUMENTS), self._on_stream_response, self._on_broken)
            for _ in range(num_streams)
        ]

    def __enter__(self) -> LoadClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, request: LoadRequest) -> Trace:
        """Send one request; its trace fills while the answer streams, or holds the error.

        Raises GenerateError for an input that the model's dtype cannot hold, and for a stream that
        has broken.
        """
        if self._broken is not None:
            raise GenerateError(self._broken)
        number = next(self._ids)
        inputs = {"stream": True, **self._extra, **request.inputs}
        # Every output costs every response: what the request tells itself isn't asked for.
        token_ids = request.inputs.get("input_ids")
        num_known = len(token_ids) if isinstance(token_ids, Sequence) else 0
        counts = COUNTS[:1] if num_known else COUNTS
        inputs |= {name: True for name in counts if name in self._specs}
        unknown = {name: v for name, v in inputs.items() if name not in self._specs}
        tensors = [tensor(n, v, self._specs[n]) for n, v in inputs.items() if n in self._specs]
        trace = Trace(self._clock(), num_known, request_id=str(number))
        with self.changed:
            self._open[str(number)] = trace
        message = infer_request(
            self._model, str(number), tensors, {**unknown, **request.parameters}
        )
        self._streams[number % len(self._streams)].send(message)
        return trace

    @property
    def num_open(self) -> int:
        return len(self._open)

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> bool:
        """Block until the condition holds, looked at whenever a request ends."""
        with self.changed:
            return self.changed.wait_for(until, seconds)

    def close(self) -> None:
        """End the streams; what still runs is cancelled."""
        for stream in self._streams:
            stream.close(cancel=bool(self._open))

    def _on_broken(self, reason: str) -> None:
        """A stream that breaks ends every open request, and the client with it."""
        self._broken = reason
        self._end(list(self._open), reason)

    def _on_stream_response(self, message: Any) -> None:
        """Called in a stream's own thread."""
        now = self._clock()
        response = message.infer_response
        trace = self._open.get(response.id)
        if trace is None:
            return
        if message.error_message:
            self._end([response.id], message.error_message)
            return
        if response.outputs:
            self._note(trace, response, now)
            if self._read_response is not None:
                self._read_response(response.id, response)
        if response.parameters["triton_final_response"].bool_param:
            self._end([response.id], None)

    def _note(self, trace: Trace, response: Any, now: float) -> None:
        tokens = 1
        for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
            if output.name == "num_output_tokens":
                tokens = int.from_bytes(content[:4], "little")
            elif output.name == "num_input_tokens" and not trace.num_prompt_tokens:
                trace.num_prompt_tokens = int.from_bytes(content[:4], "little")
        if tokens:
            trace.arrivals.append(Arrival(now, tokens))

    def _end(self, request_ids: Sequence[str], error: str | None) -> None:
        for request_id in request_ids:
            with self.changed:
                trace = self._open.pop(request_id, None)
                if trace is None:
                    continue
                trace.error = error
                self.changed.notify_all()
            self._on_ended()


def input_specs(address: str, model: str) -> dict[str, TensorSpec]:
    """What the model takes. Raises GenerateError where no server has such a model."""
    client = grpc.InferenceServerClient(address, channel_args=list(CHANNEL_ARGUMENTS))
    try:
        metadata = client.get_model_metadata(model, client_timeout=METADATA_TIMEOUT_SECONDS)
    except InferenceServerException as error:
        raise GenerateError(str(error.message() or error)) from error
    finally:
        client.close()
    return {each.name: TensorSpec(each.datatype, len(each.shape)) for each in metadata.inputs}


def closed_loop(
    client: LoadClient, requests: Sequence[LoadRequest], concurrency: int
) -> list[Trace]:
    """Keep ``concurrency`` requests running until all are done."""
    traces: list[Trace] = []
    for request in requests:
        client.wait(lambda: client.num_open < concurrency)
        traces.append(client.submit(request))
    client.wait(lambda: client.num_open == 0)
    return traces


def open_loop(
    client: LoadClient,
    requests: Sequence[LoadRequest],
    offsets: Sequence[float],
    clock: Callable[[], float],
    wait: Callable[[float], None],
) -> list[Trace]:
    """Send each request at its offset (seconds from now), whatever has become of the others."""
    start = clock()
    traces: list[Trace] = []
    for request, offset in zip(requests, offsets, strict=True):
        left = start + offset - clock()
        if left > 0:
            wait(left)
        traces.append(client.submit(request))
    client.wait(lambda: client.num_open == 0)
    return traces


def poisson_offsets(rate: float, number: int, rng: random.Random) -> list[float]:
    """Arrival times in seconds of a Poisson process of ``rate`` per second; the first is at 0."""
    offsets = [0.0]
    while len(offsets) < number:
        offsets.append(offsets[-1] + rng.expovariate(rate))
    return offsets[:number]
