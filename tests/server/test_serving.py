"""A real tritonserver answers: HTTP, streams, gRPC, many at once, cancel, bad input, restart."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from chairlift_client.stream import generate as client_generate
from tests.server.harness import ServerProcess, wait_for
from tests.server.talk import canary, generate, heartbeat, joined, stream, wait_drained


@pytest.fixture(autouse=True)
def nothing_left_behind(server: ServerProcess):
    """After each test the canary is as before, and every block is back."""
    before = canary(server)
    yield
    wait_drained(server)
    assert canary(server) == before


def ask(question: str) -> str:
    return json.dumps([{"role": "user", "content": question}])


def test_the_chat_model_says_paris(server: ServerProcess) -> None:
    reply = generate(
        server, messages=ask("What is the capital of France?"), max_tokens=32, temperature=0.0
    )
    assert "Paris" in reply.text


def test_generate_equals_the_joined_stream(server: ServerProcess) -> None:
    body = {"text_input": "def add(a, b):\n", "max_tokens": 40, "temperature": 0.0}
    events = list(stream(server, **body))
    assert len(events) > 5, "the answer was not streamed"
    assert "".join(e["text_output"] for e in events) == generate(server, **body).text


def test_grpc_stream_ends_with_one_final_on_the_last_data(server: ServerProcess) -> None:
    results: list[object] = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: results.append(error or result))
        inputs = []
        for name, value, kind in (
            ("text_input", np.array([[b"Once upon a time"]], dtype=np.object_), "BYTES"),
            ("max_tokens", np.array([[12]], dtype=np.int32), "INT32"),
            ("stream", np.array([[True]]), "BOOL"),
            ("return_finish_reason", np.array([[True]]), "BOOL"),
        ):
            tensor = grpcclient.InferInput(name, value.shape, kind)
            tensor.set_data_from_numpy(value)
            inputs.append(tensor)
        client.async_stream_infer("llm", inputs, request_id="r1")
        wait_for("the last response", lambda: results and _is_final(results[-1]), 60)
        client.stop_stream()
    finals = [_is_final(result) for result in results]
    assert finals == [False] * (len(results) - 1) + [True]
    reasons = [result.as_numpy("finish_reason")[0][0] for result in results]
    assert reasons == [b"None"] * (len(results) - 1) + [b"length"]


def _is_final(result: object) -> bool:
    assert isinstance(result, grpcclient.InferResult), result
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_32_streams_at_once_equal_their_solo_texts(server: ServerProcess) -> None:
    prompts = [f"Number {i}: write about the colour of item {i * 7}." for i in range(32)]

    def run(prompt: str) -> str:
        return joined(
            stream(server, text_input=prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
        )

    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(run, prompts))
    assert [run(prompt) for prompt in prompts] == together


def test_closed_stream_frees_its_blocks(server: ServerProcess) -> None:
    events = stream(server, text_input="Count: 1 2 3", max_tokens=4000, ignore_eos=True)
    next(events)
    wait_for("the request to run", lambda: heartbeat(server)["running"] == 1)
    events.close()
    wait_drained(server, 3.0)


def test_cancelled_grpc_stream_frees_its_blocks(server: ServerProcess) -> None:
    url = f"grpc://127.0.0.1:{server.grpc_port}"
    chunks = client_generate(url, "Count: 1 2 3", max_tokens=4000, ignore_eos=True)
    next(chunks)
    chunks.close()
    wait_drained(server, 3.0)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text_input": "x", "max_tokens": 0}, 400, "max_tokens"),
        ({"text_input": "x", "temperature": -1.0}, 400, "temperature"),
        ({"text_input": "x", "top_p": 1.5}, 400, "top_p"),
        ({"text_input": "x", "temprature": 0.5}, 400, "temprature"),
        ({"text_input": "x", "sampling_parameters": "{"}, 400, "sampling_parameters"),
        ({"text_input": "word " * 20000, "max_tokens": 4}, 400, "prompt"),
        ({"max_tokens": 4}, 400, "text_input is required"),
        ({"text_input": "x", "beam_width": 3}, 400, "beam_width"),
    ],
)
def test_bad_input_is_one_clear_error(
    server: ServerProcess, body: dict[str, object], status: int, words: str
) -> None:
    reply = generate(server, **body)
    assert reply.status == status, reply
    assert words in reply.body["error"]


def test_ends_cleanly_and_starts_again(start_server) -> None:
    """SIGTERM ends with exit code 0; a second server on the same machine gives the same answer."""
    texts = []
    for number in (signal.SIGTERM, signal.SIGINT):
        server = start_server("--no-greet")
        texts.append(canary(server))
        server.signal(number)
        assert server.process.wait(60) == 0, server.log()[-3000:]
    assert texts[0] == texts[1]
