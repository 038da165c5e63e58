"""What other servers got wrong when requests share a batch, a stream or a tokenizer, on a real
server: REPORTED.md says which case is which."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from tests.server.grpc_talk import tensors
from tests.server.harness import ServerProcess, wait_for
from tests.server.talk import canary, generate, joined, post, stream, wait_drained

STORY = "Once upon a time"
LENGTH = 10


@pytest.fixture(autouse=True, scope="module")
def canary_sings(server: ServerProcess) -> Iterator[None]:
    before = canary(server)
    yield
    assert canary(server) == before


@pytest.fixture(autouse=True)
def nothing_left_behind(server: ServerProcess) -> Iterator[None]:
    yield
    wait_drained(server)


def body(prompt: str = STORY, **sampling: Any) -> dict[str, Any]:
    settings = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **sampling}
    return {"text_input": prompt, "sampling_parameters": json.dumps(settings)}


def together(server: ServerProcess, requests: list[dict[str, Any]]) -> list[str]:
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: joined(stream(server, **request)), requests))


def alone(server: ServerProcess, requests: list[dict[str, Any]]) -> list[str]:
    return [generate(server, **request).text for request in requests]


def test_C1_C2_P12_neighbours_with_other_settings(server: ServerProcess) -> None:
    """Greedy, penalised and sampled requests of different lengths, in both orders of arrival."""
    requests = [
        body(repetition_penalty=2.0),
        body("A much longer prompt than the others, so that rows have different lengths: x"),
        body("Short", frequency_penalty=1.05),
        body(temperature=1.0, seed=3, top_p=0.9),
        body(temperature=0, seed=3, top_p=0.5, top_k=3),
        body("The end", presence_penalty=1.5, bad_words=["the"]),
    ]
    expected = alone(server, requests)
    assert together(server, requests) == expected
    assert together(server, requests[::-1]) == expected[::-1]


def test_C5_seeded_draws_go_on(server: ServerProcess) -> None:
    requests = [body(temperature=1.5, seed=seed, max_tokens=20) for seed in range(8)]
    texts = together(server, requests)
    assert len(set(texts)) == len(texts)
    assert all(len(set(text.split())) > len(text.split()) / 2 for text in texts)


def test_C6_several_answers_to_one_prompt(server: ServerProcess) -> None:
    four = {"n": 4, "seed": 1, "temperature": 1.0}

    def by_sequence(**sampling: Any) -> list[list[dict[str, Any]]]:
        request = body(**four, **sampling)
        events = list(stream(server, **request, return_finish_reason=True))
        return [[e for e in events if e["sequence_index"] == index] for index in range(4)]

    def texts(sequences: list[list[dict[str, Any]]]) -> list[str]:
        return ["".join(event["text_output"] for event in each) for each in sequences]

    first = by_sequence()
    assert len(set(texts(first))) == 4
    assert texts(by_sequence()) == texts(first)
    word = texts(first)[0][2:8]
    cut = by_sequence(stop=[word], include_stop_str_in_output=False)
    assert [each[-1]["finish_reason"] for each in cut] == [
        "stop" if word in text else "length" for text in texts(first)
    ]
    assert texts(cut) == [text.split(word)[0] for text in texts(first)]


def test_C7_log_probabilities_of_a_stream_are_those_of_the_whole(server: ServerProcess) -> None:
    request = body(logprobs=3)
    reply = generate(server, **request, return_logprobs=True)
    tokens = json.loads(reply.body["logprobs"])
    events = stream(server, **request, return_logprobs=True)
    assert [token for event in events for token in json.loads(event["logprobs"])] == tokens
    assert len(tokens) == LENGTH
    assert len({json.dumps(token) for token in tokens}) > LENGTH // 2, "not the first repeated"
    for token in tokens:
        values = [entry["logprob"] for entry in token.values()]
        assert max(values) == next(iter(values)) <= 0
    assert "logprobs" not in generate(server, **body()).body


def test_C8_answers_do_not_mix(server: ServerProcess) -> None:
    markers = [f"zq{index}x" for index in range(10)]
    requests = [body(f"Repeat: {m} {m} {m} {m}") for m in markers]
    expected = alone(server, requests)
    texts = together(server, requests)
    assert texts == expected
    for marker, text in zip(markers, texts, strict=True):
        assert not [other for other in markers if other != marker and other in text]


def test_R3_no_echo_unless_asked(server: ServerProcess) -> None:
    request = {**body(), "return_num_output_tokens": True}
    reply = generate(server, **request)
    assert not reply.text.startswith(STORY)
    assert joined(stream(server, **request)) == reply.text
    assert reply.body["num_output_tokens"] == LENGTH
    assert generate(server, **request, exclude_input_in_output=True).text == reply.text
    echoed = generate(server, **request, exclude_input_in_output=False)
    assert echoed.text == STORY + reply.text
    assert echoed.body["num_output_tokens"] == LENGTH


def test_R6_one_bad_request_fails_alone(server: ServerProcess) -> None:
    """Four on one gRPC stream, which Triton may hand over in one call of execute."""
    got: list[Any] = []
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(lambda result, error: got.append(error or result))
        for index, max_tokens in enumerate((4, 0, 4, 4)):
            values = {"text_input": STORY, "max_tokens": max_tokens}
            inputs = tensors(grpcclient, batched=True, **values)
            client.async_stream_infer("llm", inputs, request_id=str(index))
        wait_for("four ends", lambda: len(got) == 4, 60)
        client.stop_stream()
    errors = [end for end in got if not isinstance(end, grpcclient.InferResult)]
    assert len(errors) == 1
    assert "max_tokens" in str(errors[0])


NO_TEXT = b"\xff"  # within a JSON string, which Triton takes as it is


def infer_body(request_id: bytes) -> bytes:
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [STORY]}
    length = {"name": "max_tokens", "shape": [1], "datatype": "INT32", "data": [4]}
    return json.dumps({"inputs": [text, length], "id": "@"}).encode().replace(b"@", request_id)


def generate_body(request_id: bytes) -> bytes:
    values = {"text_input": STORY, "max_tokens": 4, "id": "@"}
    return json.dumps(values).encode().replace(b"@", request_id)


@pytest.mark.parametrize(
    ("path", "made"), [("llm/generate", generate_body), ("llm_infer/infer", infer_body)]
)
def test_R6_requests_that_cannot_be_read_fail_alone(
    server: ServerProcess, path: str, made: Callable[[bytes], bytes]
) -> None:
    """Forty, which is more than the relay has places for."""
    bodies = [made(b"7")] * 4 + [made(NO_TEXT)] * 40 + [made(b"7")] * 4
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda each: post(server, f"/v2/models/{path}", each), bodies))
    sound, broken = replies[:4] + replies[-4:], replies[4:-4]
    assert [reply.status for reply in sound] == [200] * 8, sound
    for reply in broken:
        assert reply.status == 400, reply
        assert "could not be read: 'utf-8' codec" in reply.body["error"]


@pytest.mark.parametrize(
    "prompt", ["Hello", "<|im_start|>user\nHello<|im_end|>", "</s> <|eot_id|> <|im_end|>"]
)
def test_R7_R8_text_is_read_as_hugging_face_reads_it(
    server: ServerProcess, tokenizer: Any, prompt: str
) -> None:
    reply = generate(server, **body(prompt, max_tokens=1), return_num_input_tokens=True)
    assert reply.body["num_input_tokens"] == len(tokenizer(prompt).input_ids)


def test_R7_R8_the_text_of_a_message_is_no_control_token(
    server: ServerProcess, tokenizer: Any
) -> None:
    def count(content: str) -> int:
        messages = [{"role": "user", "content": content}]
        asked = {"messages": json.dumps(messages), "max_tokens": 1}
        tokens: int = generate(server, **asked, return_num_input_tokens=True).body[
            "num_input_tokens"
        ]
        return tokens

    messages = [{"role": "user", "content": "Hello"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert count("Hello") == len(tokenizer(whole, add_special_tokens=False).input_ids)
    assert count("Hello<|im_end|>") > count("Hello") + 1


def test_R9_one_tokenizer_for_many_at_once(server: ServerProcess, tokenizer: Any) -> None:
    prompts = ["word " * (1 + index % 7) for index in range(48)]

    def tokens(prompt: str) -> int:
        request = body(prompt, max_tokens=2, stop=["zz"], bad_words=["qq", "rr"])
        count: int = generate(server, **request, return_num_input_tokens=True).body[
            "num_input_tokens"
        ]
        return count

    with ThreadPoolExecutor(24) as pool:
        counted = list(pool.map(tokens, prompts))
    assert counted == [len(tokenizer(prompt).input_ids) for prompt in prompts]
