"""vLLM's entry, and TensorRT-LLM's dialect, on a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.server.grpc_talk import stream_infer, tensors, texts
from tests.server.harness import ServerProcess, wait_for
from tests.server.talk import generate, joined, stream, wait_drained

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


# --- vllm_model: rank 1, vLLM's defaults


def vllm(server: ServerProcess, sampling: dict[str, Any] | None = None, **body: Any) -> Any:
    text = json.dumps({**GREEDY, **(sampling or {})})
    return generate(server, "vllm_model", text_input=PROMPT, sampling_parameters=text, **body)


def test_vllm_echoes_a_whole_answer_unless_told(server: ServerProcess, answer: str) -> None:
    assert vllm(server).text == PROMPT + answer
    assert vllm(server, exclude_input_in_output=False).text == PROMPT + answer
    assert vllm(server, exclude_input_in_output=True).text == answer


def test_vllm_streams_without_the_prompt(server: ServerProcess, answer: str) -> None:
    body = {"text_input": PROMPT, "sampling_parameters": json.dumps(GREEDY)}
    assert joined(stream(server, "vllm_model", **body)) == answer
    (event,) = stream(server, "vllm_model", **body, exclude_input_in_output=False)
    assert event["error"].endswith(
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


def test_vllm_takes_request_parameters(server: ServerProcess, answer: str) -> None:
    reply = generate(server, "vllm_model", text_input=PROMPT, parameters=GREEDY)
    assert reply.text == PROMPT + answer


def test_vllm_tensor_replaces_request_parameters(server: ServerProcess, answer: str) -> None:
    """vllm_backend's own client sends its parameters twice."""
    inputs = tensors(
        grpcclient,
        batched=False,
        text_input=PROMPT,
        stream=True,
        sampling_parameters=json.dumps(GREEDY),
    )
    results = stream_infer(
        server, "vllm_model", inputs, ("text_output",), parameters={"max_tokens": 2, "top": "x"}
    )
    assert "".join(texts(results)) == answer
    assert results[0].as_numpy("text_output").shape == (1,)


def test_vllm_additional_outputs(server: ServerProcess, answer: str) -> None:
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens")
    flags = (*flags, "num_output_tokens")
    events = list(
        stream(
            server,
            "vllm_model",
            text_input=PROMPT,
            sampling_parameters=json.dumps({**GREEDY, "logprobs": 2}),
            **{f"return_{flag}": True for flag in flags},
        )
    )
    assert [e["finish_reason"] for e in events] == ["None"] * (len(events) - 1) + ["length"]
    assert sum(e["num_output_tokens"] for e in events) == GREEDY["max_tokens"]
    assert {e["num_input_tokens"] for e in events} == {4}
    sums = [e["cumulative_logprob"] for e in events]
    assert sums == sorted(sums, reverse=True)
    tokens = [token for e in events for token in json.loads(e["logprobs"])]
    best = [alternative for token in tokens for alternative in token.values()]
    assert all(set(each) == {"logprob", "rank", "decoded_token"} for each in best)
    assert "".join(each["decoded_token"] for each in best if each["rank"] == 1) == answer


def test_vllm_n_answers_in_one_response(server: ServerProcess) -> None:
    body = vllm(server, {"n": 2, "temperature": 1.0, "seed": 1}, return_finish_reason=True).body
    assert len(set(body["text_output"])) == 2
    assert all(text.startswith(PROMPT) for text in body["text_output"])
    assert body["finish_reason"] == ["length", "length"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"sampling_parameters": '{"temperature": -3}'}, "Error generating stream: temperature"),
        ({"sampling_parameters": '{"top_p": 0}'}, "Error generating stream: top_p"),
        ({"sampling_parameters": '{"lora_name": "x"}'}, "LoRA feature is not enabled."),
        ({"embedding_request": '{"input": "x"}'}, "Model llm does not support 'embed' request"),
        ({"image": ["eA=="]}, "image is not supported"),
    ],
)
def test_vllm_errors(server: ServerProcess, body: dict[str, Any], words: str) -> None:
    reply = generate(server, "vllm_model", text_input=PROMPT, **body)
    assert reply.status == 400
    assert words in reply.body["error"]


# --- TensorRT-LLM's dialect


def test_stop_message_cancels_the_request_of_its_id(server: ServerProcess) -> None:
    got: list[Any] = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: got.append(error or result))
        inputs = tensors(grpcclient, batched=True, stream=True, end_id=-1, **LONG)
        client.async_stream_infer("llm", inputs, request_id="7")
        wait_for("the first response", lambda: got)
        stop = tensors(
            grpcclient,
            batched=True,
            input_ids=0,
            input_lengths=0,
            request_output_len=0,
            stop=True,
        )
        client.async_stream_infer("llm", stop, request_id="7", parameters={"Streaming": True})
        wait_drained(server, 5.0)
        wait_for(
            "the error",
            lambda: [e for e in got if isinstance(e, InferenceServerException)],
        )
        client.stop_stream()
    (error,) = [e for e in got if isinstance(e, InferenceServerException)]
    assert "Request was cancelled" in str(error)


def test_rows_of_one_request_are_numbered(server: ServerProcess) -> None:
    prompts = [PROMPT, "The capital of France is", "1 2 3"]
    inputs = tensors(
        grpcclient,
        batched=True,
        text_input=[[prompt] for prompt in prompts],
        max_tokens=[[6]] * 3,
        temperature=[[0.0]] * 3,
    )
    results = stream_infer(server, "llm", inputs, ("text_output", "batch_index"))
    assert all(r.as_numpy("text_output").shape == (1,) for r in results)
    rows = {int(r.as_numpy("batch_index")[0][0]): texts([r])[0] for r in results}
    assert rows == {
        index: generate(server, text_input=prompt, **GREEDY).text
        for index, prompt in enumerate(prompts)
    }


def test_num_return_sequences_are_responses_of_their_own(server: ServerProcess) -> None:
    events = list(
        stream(
            server,
            text_input=PROMPT,
            num_return_sequences=2,
            return_finish_reason=True,
            **{**GREEDY, "temperature": 1.0, "seed": 3},
        )
    )
    by_sequence = [[e for e in events if e["sequence_index"] == index] for index in (0, 1)]
    both = ["".join(e["text_output"] for e in each) for each in by_sequence]
    assert both[0] != both[1]
    assert [each[-1]["finish_reason"] for each in by_sequence] == ["length", "length"]


def test_perf_metrics_are_in_order(server: ServerProcess) -> None:
    body = generate(server, text_input=PROMPT, return_perf_metrics=True, **GREEDY).body
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns")
    times = [body[name] for name in (*names, "last_token_time_ns")]
    assert times == sorted(times)
    assert body["kv_cache_alloc_total_blocks"] >= 1
    inputs = tensors(grpcclient, batched=True, text_input=PROMPT, return_perf_metrics=True)
    drafts = ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens")
    (result,) = stream_infer(server, "llm", inputs, ("kv_cache_reused_blocks", *drafts))
    assert result.as_numpy("kv_cache_reused_blocks").shape == (1, 1)
    assert [result.as_numpy(name)[0][0] for name in drafts] == [0, 0, 0]


def test_unsigned_types_are_refused_with_both_types(server: ServerProcess) -> None:
    """langchain-nvidia-trt sends them, as the first releases of TensorRT-LLM's backend had them."""
    length = grpcclient.InferInput("max_tokens", [1, 1], "UINT32")
    length.set_data_from_numpy(np.array([[6]], dtype=np.uint32))
    inputs = [*tensors(grpcclient, batched=True, text_input=PROMPT), length]
    (error,) = stream_infer(server, "llm", inputs)
    assert "'max_tokens' data-type is 'UINT32', but model 'llm' expects 'INT32'" in str(error)


def test_log_probs_add_up(server: ServerProcess) -> None:
    body = generate(server, text_input=PROMPT, return_log_probs=True, **GREEDY).body
    assert len(body["output_log_probs"]) == GREEDY["max_tokens"]
    assert body["cum_log_probs"] == pytest.approx(sum(body["output_log_probs"]), abs=1e-3)


def test_messages_get_the_chat_template(server: ServerProcess) -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    written = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    chat = generate(server, messages=messages, return_num_input_tokens=True, **GREEDY)
    # SmolLM2's template puts a system turn of its own in front, so that it is longer.
    plain = generate(server, text_input=written, return_num_input_tokens=True, **GREEDY)
    assert chat.body["num_input_tokens"] > plain.body["num_input_tokens"]
    reply = generate(server, messages=json.dumps([{"role": "nobody", "content": "hi"}]))
    assert reply.status == 400
    assert "role" in reply.body["error"]


def test_input_ids_are_taken_as_they_are(server: ServerProcess, answer: str) -> None:
    """The ids of PROMPT in the model's own vocabulary, and padding behind input_lengths."""
    ids = [6403, 1980, 253, 655]
    assert generate(server, input_ids=ids, **GREEDY).text == answer
    inputs = tensors(grpcclient, batched=True, input_ids=[*ids, 0, 0], input_lengths=4, **GREEDY)
    assert "".join(texts(stream_infer(server, "llm", inputs))) == answer
