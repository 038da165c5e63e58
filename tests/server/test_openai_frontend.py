"""What Triton's OpenAI frontend sends through either of its converters, and what it reads.

The frontend runs within a tritonserver of its own, whose Python bindings are not on PyPI; here its
tensors come over gRPC.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import tritonclient.grpc as grpcclient

from tests.server.grpc_talk import stream_infer, tensors, texts
from tests.server.harness import ServerProcess
from tests.server.talk import generate

PROMPT = "Once upon a time"
PROMPT_TOKENS, TOKENS = 4, 6
COUNTS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


class Usage(NamedTuple):
    """As the frontend adds it up: the prompt once, and every response's own output tokens."""

    prompt: int
    completion: int


@pytest.fixture(scope="module")
def answer(server: ServerProcess) -> str:
    return generate(server, text_input=PROMPT, max_tokens=TOKENS, temperature=0.0).text


def vllm_request(chosen: dict[str, Any] | None = None, **more: Any) -> list[Any]:
    """The fields of a chat request that have a default are all there."""
    sampling = {
        **{"max_tokens": TOKENS, "temperature": 0.0, "top_p": 1.0, "n": 1, "logprobs": False},
        **{"frequency_penalty": 0.0, "presence_penalty": 0.0},
        **(chosen or {}),
    }
    values = {"text_input": PROMPT, "sampling_parameters": json.dumps(sampling), **COUNTS}
    return tensors(grpcclient, False, **{**values, "exclude_input_in_output": True, **more})


def trtllm_request(**more: Any) -> list[Any]:
    values = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "top_p": 1.0}
    penalties = {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    return tensors(grpcclient, True, **values, **penalties, **COUNTS, **more)


def usage(results: list[Any]) -> Usage:
    counts = [
        (r.as_numpy("num_input_tokens").item(), r.as_numpy("num_output_tokens").item())
        for r in results
    ]
    assert len({prompt for prompt, _ in counts}) == 1
    return Usage(counts[0][0], sum(completion for _, completion in counts))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "made"), [("vllm_model", vllm_request), ("llm", trtllm_request)])
def test_a_chat(server: ServerProcess, answer: str, model: str, made: Any, stream: bool) -> None:
    results = stream_infer(server, model, made(stream=stream))
    assert stream or len(results) == 1
    assert all(result.as_numpy("text_output").size == 1 for result in results)
    assert "".join(texts(results)) == answer
    assert usage(results) == Usage(PROMPT_TOKENS, TOKENS)


@pytest.mark.parametrize(("model", "made"), [("vllm_model", vllm_request), ("llm", trtllm_request)])
def test_a_completion_with_echo(server: ServerProcess, answer: str, model: str, made: Any) -> None:
    (result,) = stream_infer(server, model, made(stream=False, exclude_input_in_output=False))
    assert texts([result]) == [PROMPT + answer]
    assert usage([result]) == Usage(PROMPT_TOKENS, TOKENS)


def test_a_stop_string_and_a_seed(server: ServerProcess, answer: str) -> None:
    """TensorRT-LLM's dialect keeps the stop string, vLLM's does not."""
    stop = answer.split()[1]
    end = answer.index(stop)
    inputs = trtllm_request(stream=False, seed=7, stop_words=[stop])
    assert texts(stream_infer(server, "llm", inputs)) == [answer[: end + len(stop)]]
    inputs = vllm_request({"seed": 7, "stop": [stop]}, stream=False)
    assert texts(stream_infer(server, "vllm_model", inputs)) == [answer[:end]]


def test_what_a_tool_choice_asks_for_is_refused_by_name(server: ServerProcess) -> None:
    guide = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{}"}
    (error,) = stream_infer(server, "llm", trtllm_request(stream=False, **guide))
    assert "guided_decoding_guide" in str(error)
