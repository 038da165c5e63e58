"""`llm_infer`: HTTP /infer and unary gRPC, and the statuses of errors, on a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as httpclient
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from tests.server.grpc_talk import tensors
from tests.server.harness import ServerProcess, wait_for
from tests.server.talk import generate, heartbeat, post, wait_drained

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0.0, "max_tokens": 6}
LONG = {"text_input": PROMPT, "max_tokens": 4000}


@pytest.fixture(autouse=True)
def nothing_left_behind(server: ServerProcess) -> Iterator[None]:
    yield
    wait_drained(server)


@pytest.fixture(scope="module")
def answer(server: ServerProcess) -> str:
    """The greedy continuation of PROMPT."""
    return generate(server, text_input=PROMPT, **GREEDY).text


def test_R4_infer_by_every_tritonclient(server: ServerProcess, answer: str) -> None:
    def inputs(module: Any) -> list[Any]:
        return tensors(module, batched=False, text_input=PROMPT, **GREEDY)

    async def with_asyncio() -> list[Any]:
        async with (
            http_aio.InferenceServerClient(f"127.0.0.1:{server.http_port}") as http,
            grpc_aio.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc,
        ):
            return await asyncio.gather(
                http.infer("llm_infer", inputs(httpclient)),
                grpc.infer("llm_infer", inputs(grpcclient)),
            )

    results = asyncio.run(with_asyncio())
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as http:
        results.append(http.infer("llm_infer", inputs(httpclient)))
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc:
        results.append(grpc.infer("llm_infer", inputs(grpcclient)))
    for result in results:
        assert result.as_numpy("text_output").tolist() == [answer.encode()]


def test_R4_infer_gives_the_text_first_and_alone(server: ServerProcess, answer: str) -> None:
    """LiteLLM joins the data of the first output; it sends each parameter as a tensor [1]."""
    body = {
        "inputs": [
            {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]},
            {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [6]},
            {"name": "temperature", "shape": [1], "datatype": "FP32", "data": [0.0]},
        ]
    }
    reply = post(server, "/v2/models/llm_infer/infer", body)
    assert [output["name"] for output in reply.body["outputs"]] == ["text_output"]
    assert "".join(reply.body["outputs"][0]["data"]) == answer


def test_infer_takes_request_parameters_of_every_type(server: ServerProcess, answer: str) -> None:
    """Triton refuses a float as a parameter of a call between models."""
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    parameters = {"temperature": 1e-9, "max_tokens": 6, "ignore_eos": True, "stop": "#none"}
    body = {"inputs": [text], "parameters": parameters}
    reply = post(server, "/v2/models/llm_infer/infer", body)
    assert reply.body["outputs"][0]["data"] == [answer]


def test_infer_n_answers_in_one_response(server: ServerProcess) -> None:
    values = {"text_input": PROMPT, "num_return_sequences": 3, "temperature": 1.0, "seed": 1}
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        result = client.infer("llm_infer", tensors(grpcclient, batched=False, **values))
    assert len(set(result.as_numpy("text_output").tolist())) == 3


def test_infer_cancelled_reaches_the_engine(server: ServerProcess) -> None:
    ended = threading.Event()
    errors: list[Any] = []

    def done(result: Any, error: Any) -> None:
        errors.append(error)
        ended.set()

    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        inputs = tensors(grpcclient, batched=False, end_id=-1, **LONG)
        call = client.async_infer("llm_infer", inputs, done)
        wait_for("the request to run", lambda: heartbeat(server)["running"] == 1)
        call.cancel()
        wait_drained(server, 5.0)
        assert ended.wait(10)
    assert "CANCELLED" in str(errors[0].status())


def test_X4_a_clients_own_timeout_ends_the_work(server: ServerProcess) -> None:
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        inputs = tensors(grpcclient, batched=False, end_id=-1, **LONG)
        with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
            client.infer("llm_infer", inputs, client_timeout=0.5)
        wait_drained(server, 5.0)


@pytest.mark.parametrize(
    ("model", "values", "status", "words"),
    [
        ("llm_infer", {"max_tokens": 0}, 400, "max_tokens"),
        ("llm_infer", {"beam_width": 3}, 501, "beam_width is not supported"),
        ("llm_infer", {"stream": True}, 501, "stream is not supported here: use llm"),
        ("llm_infer", {"text_input": "word " * 20000}, 400, "prompt has"),
        ("llm_infer", {"no_such": 1}, 400, "no_such"),
        ("no_such_model", {}, 404, "unknown model"),
        ("llm", {}, 501, "decoupled"),
    ],
)
def test_errors_have_the_status_that_fits(
    server: ServerProcess, model: str, values: dict[str, Any], status: int, words: str
) -> None:
    inputs = tensors(
        httpclient, batched=model == "llm", **{"text_input": PROMPT, "max_tokens": 2, **values}
    )
    with (
        httpclient.InferenceServerClient(f"127.0.0.1:{server.http_port}") as client,
        pytest.raises(InferenceServerException) as raised,
    ):
        client.infer(model, inputs)
    assert raised.value.status() == str(status), raised.value.message()
    assert words in raised.value.message()


def test_a_request_out_of_time_is_unavailable(server: ServerProcess) -> None:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}
    length = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [4000]}
    body = {"inputs": [text, length], "parameters": {"timeout": 200_000}}
    reply = post(server, "/v2/models/llm_infer/infer", body)
    assert reply.status == 503
    assert "timeout" in reply.body["error"].lower()
