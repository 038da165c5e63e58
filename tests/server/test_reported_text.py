"""What other servers got wrong in their texts, on a real server: REPORTED.md says which case.

Stop strings are chosen from the model's own answer, so that any model will do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.harness import ServerProcess
from tests.server.talk import canary, generate, joined, stream, wait_drained

STORY = "Once upon a time"
CODE = "def add(a, b):\n"
PROMPTS = [
    STORY,
    CODE,
    "List three fruits:",
    "1. Apples\n2. Pears\n3.",
    "class Point:\n    def __init__(self, x, y):\n",
    "The meaning of life is",
    "A blank at the end ",
    "A line at the end\n",
]
FOREIGN = [
    "翻译成中文: good morning 🌶️🌶️ ->",
    "漢字 漢字 漢字 漢字",
    "हिन्दी हिन्दी हिन्दी",
    "🏳️‍🌈 🏳️‍🌈 🏳️‍🌈",
]
LENGTH = 24
# Tokens that are single bytes of characters of several: any text of them is mostly broken.
BYTE_PIECES = "🌶漢हé🏳"


@pytest.fixture(autouse=True, scope="module")
def canary_sings(server: ServerProcess) -> Iterator[None]:
    before = canary(server)
    yield
    assert canary(server) == before


@pytest.fixture(autouse=True)
def nothing_left_behind(server: ServerProcess) -> Iterator[None]:
    yield
    wait_drained(server)


def body(prompt: str, **sampling: Any) -> dict[str, Any]:
    settings = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, **sampling}
    return {"text_input": prompt, "sampling_parameters": json.dumps(settings)}


def whole(server: ServerProcess, prompt: str, **sampling: Any) -> str:
    return generate(server, **body(prompt, **sampling)).text


def streamed(server: ServerProcess, prompt: str, **sampling: Any) -> str:
    return joined(stream(server, **body(prompt, **sampling)))


def both(server: ServerProcess, prompt: str, **sampling: Any) -> str:
    """The text of the whole answer, which the stream must give too."""
    text = whole(server, prompt, **sampling)
    assert streamed(server, prompt, **sampling) == text
    return text


def bias_to_bytes(tokenizer: Any) -> dict[str, float]:
    ids = tokenizer(BYTE_PIECES, add_special_tokens=False).input_ids
    return {str(i): 60.0 for i in ids if tokenizer.decode([i]) == "\N{REPLACEMENT CHARACTER}"}


@pytest.fixture(scope="module")
def story(server: ServerProcess) -> str:
    return whole(server, STORY)


def test_D1_D4_stream_and_whole_answer_are_the_same_text(server: ServerProcess) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: both(server, prompt), PROMPTS))
    assert [text for text in texts if text != text.lstrip()], "leading blanks are kept"
    assert all(" " in text.strip() for text in texts)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_D2_characters_of_several_tokens(server: ServerProcess, tokenizer: Any, seed: int) -> None:
    bias = bias_to_bytes(tokenizer)
    assert len(bias) > 5
    text = both(server, FOREIGN[0], logit_bias=bias, temperature=1.5, seed=seed, max_tokens=40)
    assert not text.isascii()


def test_D5_alone_together_and_with_logprobs(server: ServerProcess) -> None:
    alone = [streamed(server, prompt) for prompt in FOREIGN]
    with ThreadPoolExecutor(2 * len(FOREIGN)) as pool:
        together = list(pool.map(lambda prompt: streamed(server, prompt), FOREIGN * 2))
        logprobs = list(pool.map(lambda prompt: streamed(server, prompt, logprobs=2), FOREIGN))
    assert together == alone * 2
    assert logprobs == alone


def test_D6_a_stop_that_cannot_match_withholds_nothing(server: ServerProcess) -> None:
    plain = [event["text_output"] for event in stream(server, **body(STORY))]
    never = body(STORY, stop=["#####END-OF-ANSWER#####"])
    guarded = [event["text_output"] for event in stream(server, **never)]
    for chunks in (plain, guarded):
        assert chunks[0]
        assert sum(not chunk for chunk in chunks) < len(chunks) / 10
    assert guarded[0] == plain[0]
    assert "".join(guarded) == "".join(plain)


def forced_end(tokenizer: Any, **sampling: Any) -> dict[str, Any]:
    """The end token at the first place where min_tokens lets it through."""
    bias = {str(tokenizer.eos_token_id): 100.0}
    settings = {"logit_bias": bias, "min_tokens": 3, "ignore_eos": False, **sampling}
    return {**body(STORY, **settings), "return_finish_reason": True}


@pytest.mark.parametrize("skip", [True, False])
def test_D8_S7_special_tokens_are_not_text(
    server: ServerProcess, tokenizer: Any, story: str, skip: bool
) -> None:
    request = forced_end(tokenizer, skip_special_tokens=skip)
    reply = generate(server, **request)
    assert reply.body["finish_reason"] == "stop"
    assert joined(stream(server, **request)) == reply.text
    assert reply.text.removesuffix("" if skip else tokenizer.eos_token)
    assert story.startswith(reply.text.removesuffix("" if skip else tokenizer.eos_token))


def middle(text: str, count: int) -> str:
    """So many words from the middle, without a blank in front, that occur there first."""
    words = text.split(" ")
    start = next(
        i
        for i in range(3, len(words) - count)
        if words[i] and text.index(" ".join(words[i : i + count])) > len(text) // 4
    )
    return " ".join(words[start : start + count])


def stop_cuts(server: ServerProcess, prompt: str, text: str, stop: str) -> None:
    for include in (False, True):
        end = text.index(stop) + (len(stop) if include else 0)
        answer = both(server, prompt, stop=[stop], include_stop_str_in_output=include)
        assert answer == text[:end]


def test_S2_a_stop_string_of_several_tokens(server: ServerProcess, story: str) -> None:
    stop_cuts(server, STORY, story, middle(story, 3))
    request = body(STORY, stop=[middle(story, 3)])
    reply = generate(server, **request, return_num_output_tokens=True)
    assert reply.body["num_output_tokens"] < LENGTH - 2


def test_S4_a_stop_string_that_nearly_matches(server: ServerProcess, story: str) -> None:
    assert both(server, STORY, stop=[middle(story, 1) + "§", middle(story, 2) + "§"]) == story


def test_S6_stop_words_match_the_text(server: ServerProcess, story: str) -> None:
    word = middle(story, 1)
    stop_cuts(server, STORY, story, word)
    stop_cuts(server, STORY, story, " " + word)
    code = whole(server, CODE)
    line = code.index("\n", 4)
    stop_cuts(server, CODE, code, code[line : line + 2])


def test_S8_nothing_follows_the_stop(server: ServerProcess, story: str) -> None:
    chunks = [event["text_output"] for event in stream(server, **body(STORY))]
    long = next(chunk for chunk in chunks[4:] if len(chunk) >= 4)
    stop_cuts(server, STORY, story, long[:-1])
