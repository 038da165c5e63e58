"""`chairlift serve --wire vllm`: the engine's own entry has vllm_backend's ranks and dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.server.grpc_talk import stream_infer, tensors, texts
from tests.server.harness import ServerProcess, running_server, wait_for
from tests.server.talk import generate, heartbeat, joined, stream, wait_drained

PROMPT = "Once upon a time"
SAMPLING = {"temperature": 0.0, "max_tokens": 6}
BODY = {"text_input": PROMPT, "sampling_parameters": json.dumps(SAMPLING)}
COUNTS = ("num_input_tokens", "num_output_tokens")


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("vllm"), "--wire", "vllm", "--no-greet") as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left_behind(wired: ServerProcess) -> Iterator[None]:
    yield
    wait_drained(wired)


@pytest.fixture(scope="module")
def answer(wired: ServerProcess) -> str:
    """The greedy continuation of PROMPT."""
    return generate(wired, **BODY, exclude_input_in_output=True).text


def test_a_whole_answer_has_the_prompt_and_a_stream_has_not(
    wired: ServerProcess, answer: str
) -> None:
    assert generate(wired, **BODY).text == PROMPT + answer
    assert joined(stream(wired, **BODY)) == answer
    (event,) = stream(wired, **BODY, exclude_input_in_output=False)
    assert event["error"] == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_tensors_have_no_batch_dimension(wired: ServerProcess, answer: str) -> None:
    flags = {f"return_{name}": True for name in COUNTS}
    inputs = tensors(grpcclient, False, **BODY, stream=True, **flags)
    results = stream_infer(wired, "llm", inputs)
    assert "".join(texts(results)) == answer
    for result in results:
        assert result.as_numpy("text_output").shape == (1,)
        counts = [result.as_numpy(name) for name in COUNTS]
        assert [(each.shape, each.dtype) for each in counts] == [((1,), np.uint32)] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_reaches_a_running_request(wired: ServerProcess, stream: bool) -> None:
    """As vllm_backend's client cancels: it hears CANCELLED, and nothing after it."""
    got: list[Any] = []
    endless = json.dumps({"temperature": 0.0, "max_tokens": 4000, "ignore_eos": True})
    values = {"text_input": PROMPT, "sampling_parameters": endless, "stream": stream}
    with grpcclient.InferenceServerClient(f"127.0.0.1:{wired.grpc_port}") as client:
        client.start_stream(lambda result, error: got.append(error or result))
        client.async_stream_infer("llm", tensors(grpcclient, False, **values))
        wait_for("the request to run", lambda: heartbeat(wired)["running"] == 1)
        client.stop_stream(cancel_requests=True)
        wait_drained(wired, 5.0)
    *before, last = got
    assert isinstance(last, InferenceServerException)
    assert last.status() == "StatusCode.CANCELLED"
    assert stream or not before


def test_the_other_entries_follow(wired: ServerProcess, answer: str) -> None:
    assert generate(wired, "vllm_model", **BODY).text == PROMPT + answer
    with grpcclient.InferenceServerClient(f"127.0.0.1:{wired.grpc_port}") as client:
        result = client.infer("llm_infer", tensors(grpcclient, False, **BODY))
    assert result.as_numpy("text_output").tolist() == [(PROMPT + answer).encode()]
