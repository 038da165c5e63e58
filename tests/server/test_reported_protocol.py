"""What other servers got wrong in limits, values, batches and the protocol, on a real server:
REPORTED.md says which case is which. Shared with test_reported_text: one server, few tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import pytest

from tests.server.harness import ServerProcess
from tests.server.talk import Reply, canary, generate, joined, stream, wait_drained

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
    settings = {"temperature": 0.0, "max_tokens": LENGTH, **sampling}
    return {"text_input": prompt, "sampling_parameters": json.dumps(settings)}


def ask(server: ServerProcess, prompt: str = STORY, **sampling: Any) -> Reply:
    return generate(server, **body(prompt, **sampling))


def refused(server: ServerProcess, request: dict[str, Any], *words: str) -> None:
    """A 400 that holds the words, and over a stream the same error."""
    reply = generate(server, **request)
    assert reply.status == 400, reply
    assert all(word in reply.body["error"] for word in words), reply.body
    (event,) = stream(server, **request)
    assert event["error"] == reply.body["error"]


@pytest.fixture(scope="module")
def greedy(server: ServerProcess) -> str:
    return ask(server).text


# --- 3. Length limits and prompt checks


def test_L2_L8_a_too_long_prompt_is_refused_with_both_numbers(server: ServerProcess) -> None:
    for ending in ("one", "two"):
        refused(server, body("word " * 9000 + ending), "900", "8191")


@pytest.mark.parametrize(
    ("max_tokens", "fine"),
    [
        (100_000_000, True),
        (2**31 - 1, True),
        (2**31, True),
        (2**53 + 1, True),
        (10**18, True),
        ("16", True),
        (2**63, False),
        (1e300, False),
        (1.5, False),
        (True, False),
    ],
)
def test_L4_L5_max_tokens_beyond_the_context(
    server: ServerProcess, greedy: str, max_tokens: object, fine: bool
) -> None:
    """Held to the context (tests/unit has the finish reason); a stop keeps this one short."""
    request = body(max_tokens=max_tokens, stop=[greedy[:8]])
    if fine:
        assert generate(server, **request).text == greedy[:8]
        assert joined(stream(server, **request)) == greedy[:8]
    else:
        refused(server, request, "max_tokens")


def test_L6_the_default_length_is_known_and_owned_up_to(server: ServerProcess) -> None:
    with urlopen(f"{server.http}/v2/models/llm/config") as response:
        shown = json.load(response)["parameters"]["default_max_tokens"]["string_value"]
    flags = {"return_finish_reason": True, "return_num_output_tokens": True}
    reply = generate(server, text_input=STORY, **flags).body
    assert reply["finish_reason"] == "length"
    assert reply["num_output_tokens"] == int(shown)


# --- 4. Sampling parameters


@pytest.mark.parametrize("temperature", [0, 1e-4, 1e-7, 1e-38])
@pytest.mark.parametrize("extra", [{"top_p": 0.95, "top_k": 50}, {"top_p": 1e-4}])
def test_P2_P12_tiny_temperatures_are_greedy(
    server: ServerProcess, greedy: str, temperature: float, extra: dict[str, Any]
) -> None:
    assert ask(server, temperature=temperature, seed=1, **extra).text == greedy


def test_P2_a_small_temperature_is_no_error(server: ServerProcess) -> None:
    assert ask(server, temperature=1e-2, top_p=0.95, top_k=50, seed=1).text


@pytest.mark.parametrize(
    "off", [{"top_k": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 0, "temperature": 0}]
)
def test_P4_values_that_mean_off(server: ServerProcess, off: dict[str, Any]) -> None:
    plain = {"temperature": 1.0, "seed": 5}
    given = {**plain, **off}
    expected = ask(server, **{**plain, "temperature": given["temperature"]}).text
    assert ask(server, **given).text == expected
    assert joined(stream(server, **body(**given))) == expected


def test_P4_values_out_of_range(server: ServerProcess, greedy: str) -> None:
    refused(server, body(top_p=1.0001), "top_p")
    refused(server, body(top_k=-2), "top_k")
    assert ask(server, min_p=1, temperature=1.0, seed=1).text == greedy


@pytest.mark.parametrize("seed", [0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, "7"])
def test_P5_a_seed_gives_the_same_text_again(server: ServerProcess, seed: object) -> None:
    first, second = (ask(server, temperature=1.0, seed=seed).text for _ in range(2))
    assert first == second
    assert first != ask(server, temperature=1.0, seed=11).text


@pytest.mark.parametrize("seed", [-1, 2**64, -(2**63) - 1, 1.5, "x"])
def test_P5_not_a_seed(server: ServerProcess, seed: object) -> None:
    refused(server, body(seed=seed), "seed")


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"stop_token_ids": [999999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ],
)
def test_P6_ids_outside_the_vocabulary(
    server: ServerProcess, sampling: dict[str, Any], word: str
) -> None:
    refused(server, body(**sampling), word)


def test_P7_forms_of_one_value_mean_the_same(server: ServerProcess, greedy: str) -> None:
    word = greedy[4:9]
    forms: list[dict[str, Any]] = [
        {"text_input": STORY, "max_tokens": 6, "temperature": 1, "top_p": 1, "seed": 3},
        {"text_input": STORY, "parameters": {"max_tokens": 6, "temperature": 1.0, "seed": 3}},
        {"text_input": STORY, **sampling_text(max_tokens=6.0, temperature="1", seed="3")},
    ]
    assert len({generate(server, **form).text for form in forms}) == 1
    assert ask(server, stop=word).text == ask(server, stop=[word]).text


def sampling_text(**sampling: Any) -> dict[str, str]:
    return {"sampling_parameters": json.dumps(sampling)}


@pytest.mark.parametrize("text", ["{", "[]", "null", '""', '"' + "x" * (1 << 20) + '"'])
def test_P7_what_is_no_json_object(server: ServerProcess, text: str) -> None:
    refused(server, {"text_input": STORY, "sampling_parameters": text}, "sampling_parameters")


def test_P7_misspelt_names(server: ServerProcess) -> None:
    refused(server, {"text_input": STORY, "temprature": 0.1}, "temprature")
    refused(server, {"text_input": STORY, "parameters": {"temprature": 0.1}}, "temprature")
    refused(server, body(temprature=0.1), "temprature")


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_P9_exactly_min_tokens_before_a_forced_end(
    server: ServerProcess, tokenizer: Any, min_tokens: int
) -> None:
    bias = {str(tokenizer.eos_token_id): 100.0}
    request = body(logit_bias=bias, min_tokens=min_tokens)
    flags = {"return_num_output_tokens": True, "return_finish_reason": True}
    reply = generate(server, **request, **flags).body
    assert reply["finish_reason"] == "stop"
    assert len(tokenizer(reply["text_output"]).input_ids) == min_tokens
    assert reply["num_output_tokens"] - 1 == min_tokens, "the end token is counted"


@pytest.mark.parametrize("count", [1, 2])
def test_P10_bad_words_with_and_without_a_blank(
    server: ServerProcess, greedy: str, count: int
) -> None:
    phrase = " ".join(greedy.split()[1 : 1 + count])
    assert phrase in greedy
    assert phrase not in ask(server, bad_words=[phrase]).text.split()
    assert f" {phrase}" not in ask(server, bad_words=[phrase]).text


@pytest.mark.parametrize(
    "used",
    [
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "["},
        {"beam_width": 3, "stream": True},
    ],
)
def test_P11_C10_what_is_not_offered_is_refused(
    server: ServerProcess, used: dict[str, Any]
) -> None:
    refused(server, {"text_input": STORY, **used}, next(iter(used)), "not supported")
