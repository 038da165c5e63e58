"""Malformed requests to a live server, eight at once: one clear error or an answer for each.

CI sends a few; ``CHAIRLIFT_LIVE_FUZZ_REQUESTS=2000`` sends as many as that. Beside every eight runs
one sound request, whose text must not change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as grpcclient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from chairlift.tensors import INPUTS, NUMPY_TYPES
from tests.server.grpc_talk import stream_infer
from tests.server.harness import ServerProcess, running_server
from tests.server.talk import canary, wait_drained
from tests.unit.malformed import ELEMENTS, JSON_VALUES, NAMES, TEXT_INPUTS, TEXTS, tensors

REQUESTS = int(os.environ.get("CHAIRLIFT_LIVE_FUZZ_REQUESTS", "160"))
AT_ONCE = 8
DATATYPES = {str(kind): name for name, kind in NUMPY_TYPES.items()} | {"object": "BYTES"}
REFUSALS = ("INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND")

PROMPTS = st.sampled_from(["text_input"] * 4 + ["messages", "input_ids", "nonsense"])
WIRE_TEXTS = TEXTS.map(lambda text: text.encode(errors="replace").decode())  # what protobuf takes
PARAMETERS = st.dictionaries(
    NAMES.filter(lambda name: name not in ("priority", "timeout")),  # the client's own
    st.one_of(WIRE_TEXTS, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats()),
    max_size=3,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Answers of at most 64 tokens, and too few blocks for eight requests of sixteen answers."""
    assignments = ("max_model_len=64", "num_kv_blocks=200", "max_num_seqs=32")
    folder = tmp_path_factory.mktemp("fuzz")
    options = [word for each in assignments for word in ("--set", each)]
    with running_server(folder, "--no-greet", *options) as server:
        yield server


class HttpRequest(NamedTuple):
    path: str
    payload: bytes
    answer: str

    def send(self, server: ServerProcess) -> None:
        """Fails where the reply is neither an answer nor one clear error."""
        connection = HTTPConnection("127.0.0.1", server.http_port, timeout=120.0)
        try:
            connection.request("POST", self.path, self.payload)
            response = connection.getresponse()
            lines = [line.removeprefix(b"data: ") for line in response.read().splitlines()]
            messages = [json.loads(line) for line in lines if line]
        finally:
            connection.close()
        check_http(response.status, messages, self.answer)


class GrpcRequest(NamedTuple):
    model: str
    arrays: dict[str, Any]
    parameters: dict[str, Any]
    request_id: str

    def send(self, server: ServerProcess) -> None:
        """Fails where the reply is neither an answer nor one clear error."""
        inputs = []
        for name, array in self.arrays.items():
            tensor = grpcclient.InferInput(name, list(array.shape), DATATYPES[str(array.dtype)])
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        options = {"request_id": self.request_id, "parameters": self.parameters}
        if self.model != "llm_infer":
            check_stream(stream_infer(server, self.model, inputs, **options))
            return
        with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
            try:
                results = [client.infer(self.model, inputs, **options)]
            except InferenceServerException as error:
                assert str(error.status()).removeprefix("StatusCode.") in REFUSALS, error
                results = [error]
            check_stream(results)


def json_values(name: str) -> st.SearchStrategy[Any]:
    """Mostly what the input takes."""
    spec = INPUTS.get(name)
    if spec is None:
        return JSON_VALUES
    sound = TEXTS if spec.datatype == "STRING" else ELEMENTS[spec.datatype]
    sound = TEXT_INPUTS.get(name, sound)
    return st.one_of(sound, st.lists(sound, max_size=3) if spec.many else sound, JSON_VALUES)


def damaged(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """Now and then cut short, or of another kind altogether."""
    text = json.dumps(body)
    odd = draw(st.integers(0, 19))
    if odd == 0:
        text = text[: draw(st.integers(0, len(text)))]
    elif odd == 1:
        text = json.dumps(draw(JSON_VALUES))
    return text.encode()


@st.composite
def generate_requests(draw: st.DrawFn) -> HttpRequest:
    names = draw(st.lists(st.sampled_from([*INPUTS, "nonsense"]), max_size=3, unique=True))
    body = {name: draw(json_values(name)) for name in dict.fromkeys([draw(PROMPTS), *names])}
    nested = draw(st.dictionaries(NAMES, JSON_VALUES, max_size=2))
    body |= {"parameters": nested} if draw(st.booleans()) else nested
    model = draw(st.sampled_from(["llm", "llm", "vllm_model"]))
    path = f"/v2/models/{model}/{draw(st.sampled_from(['generate', 'generate_stream']))}"
    return HttpRequest(path, damaged(draw, body), "text_output")


@st.composite
def infer_requests(draw: st.DrawFn) -> HttpRequest:
    names = draw(st.lists(st.sampled_from([*INPUTS, "nonsense"]), max_size=3, unique=True))
    arrays = {n: draw(tensors(n, False)) for n in dict.fromkeys([draw(PROMPTS), *names])}
    listed: list[dict[str, Any]] = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": DATATYPES[str(array.dtype)],
            "data": [
                value.decode(errors="replace") if isinstance(value, bytes) else value
                for value in array.reshape(-1).tolist()
            ],
        }
        for name, array in arrays.items()
    ]
    if draw(st.integers(0, 9)) == 0:
        key = draw(st.sampled_from(["name", "shape", "datatype", "data"]))
        listed[0][key] = draw(JSON_VALUES)
    body = damaged(draw, {"inputs": listed, "parameters": draw(PARAMETERS)})
    return HttpRequest("/v2/models/llm_infer/infer", body, "outputs")


@st.composite
def grpc_requests(draw: st.DrawFn) -> GrpcRequest:
    model = draw(st.sampled_from(["llm", "llm", "vllm_model", "llm_infer"]))
    names = draw(st.lists(st.sampled_from([*INPUTS, "nonsense"]), max_size=3, unique=True))
    wanted = dict.fromkeys([draw(PROMPTS), *names])
    arrays = {name: draw(tensors(name, batched=model == "llm")) for name in wanted}
    return GrpcRequest(model, arrays, draw(PARAMETERS), draw(st.sampled_from(["", "7"])))


def check_http(status: int, messages: list[dict[str, Any]], answer: str) -> None:
    *before, last = messages
    if status == 500:  # Triton's own, for a body that is not the JSON it expects
        assert any(word in last["error"] for word in ("JSON", "parse", "attempt")), messages
    else:
        assert status in (200, 400, 404, 501), (status, messages)
    assert all(answer in message for message in before), messages
    if "error" in last:
        check_error(last["error"])
    else:
        assert status == 200 and answer in last, messages


def check_stream(results: list[Any]) -> None:
    *before, last = results
    if isinstance(last, InferenceServerException):
        check_error(last.message())
    else:
        before = results
    assert all(result.as_numpy("text_output").size for result in before)


def check_error(message: str) -> None:
    assert 0 < len(message) < 2000, message
    assert "Traceback" not in message and "Stub" not in message, message


def test_one_clear_error_or_an_answer(small: ServerProcess) -> None:
    text, stub = canary(small), small.stub_pid()
    one = st.one_of(generate_requests(), infer_requests(), grpc_requests())

    @settings(
        max_examples=max(1, REQUESTS // AT_ONCE),
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each attempt to shrink sends eight
        suppress_health_check=list(HealthCheck),
    )
    @given(requests=st.lists(one, min_size=AT_ONCE, max_size=AT_ONCE))
    def send(requests: list[HttpRequest | GrpcRequest]) -> None:
        with ThreadPoolExecutor(AT_ONCE + 1) as pool:
            bystander = pool.submit(canary, small)
            for done in [pool.submit(request.send, small) for request in requests]:
                done.result(timeout=300)
            assert bystander.result(timeout=300) == text

    send()
    wait_drained(small)
    assert small.stub_pid() == stub, "the server was restarted"
    assert "Traceback" not in small.log(), small.log()[-4000:]
