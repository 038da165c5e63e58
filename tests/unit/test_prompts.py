"""Prompts become the right ids, and only prompts that fit; ids are of reported-faults.md."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.bad_words import spellings
from chairlift.calls import (
    ChatPrompt,
    GenerateCall,
    Message,
    OutputOptions,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from chairlift.errors import ErrorCode, RequestError
from chairlift.prompts import PreparedPrompt, PromptProcessor
from chairlift.request import SamplingParams
from chairlift.token_pieces import TokenPieces
from tests.unit import tokenizer_harness as harness

CHAT_KINDS = {
    "byte_level": harness.byte_level,
    "sentencepiece": harness.sentencepiece,
    "sentencepiece_first": lambda: harness.sentencepiece(legacy=False),
    "smollm2": harness.smollm2,
}
PIECES = ["hello", " world", "\n", "<", "|", "user", "|>", "<|user|>", "</s>", "<s>", "<|system|>"]
SPECIAL_WORDS = [*PIECES, "<|im_end|>", "<|im_start|>", "<|assistant|>", " "]


@cache
def processor(
    tokenizer: Any, max_model_len: int = 64, add_special_tokens: bool = True
) -> PromptProcessor:
    return PromptProcessor(
        tokenizer,
        None,
        max_model_len=max_model_len,
        vocab_size=len(tokenizer) + 5,
        add_special_tokens=add_special_tokens,
    )


def prepare(
    tokenizer: Any, prompt: Prompt, *, echo: bool = False, settings: Any = None, **params: Any
) -> PreparedPrompt:
    call = GenerateCall("", prompt, SamplingParams(**params), OutputOptions(echo=echo))
    return processor(tokenizer, **(settings or {})).prepare(call)


def chat(*turns: tuple[str, str]) -> ChatPrompt:
    return ChatPrompt(tuple(Message(role, content) for role, content in turns))


def hugging_face(tokenizer: Any, prompt: ChatPrompt) -> list[int]:
    turns = [message._asdict() for message in prompt.messages]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def test_text_is_parsed_as_hugging_face_does() -> None:
    """R8, completion style: control tokens written in the text are control tokens."""
    for tokenizer in (harness.byte_level(), harness.sentencepiece(), harness.smollm2()):
        for text in ("plain text", "a</s>b", "<|user|>  x", "漢字 <|im_end|>"):
            assert prepare(tokenizer, TextPrompt(text)).token_ids == tokenizer(text).input_ids


def test_r7_one_bos_and_no_more() -> None:
    tokenizer = harness.byte_level()
    bos = tokenizer.bos_token_id
    plain = prepare(tokenizer, TextPrompt("hello")).token_ids
    assert plain == tokenizer("hello").input_ids
    assert prepare(tokenizer, TextPrompt("<s>hello")).token_ids == plain
    templated = prepare(tokenizer, chat(("user", "hello"))).token_ids
    assert templated.count(bos) == 1
    without = harness.byte_level(bos=False)
    assert bos not in prepare(without, TextPrompt("hello")).token_ids
    assert prepare(without, TextPrompt("<s>hello")).token_ids.count(bos) == 1
    settings = {"add_special_tokens": False}
    assert bos not in prepare(tokenizer, TextPrompt("hello"), settings=settings).token_ids


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_chat_equals_hugging_face_where_nothing_is_forged(kind: str) -> None:
    tokenizer = CHAT_KINDS[kind]()
    prompt = chat(("system", "Be kind. "), ("user", " hi\n 漢字 <b>"), ("assistant", "yes"))
    room = {"max_model_len": 512}
    assert prepare(tokenizer, prompt, settings=room).token_ids == hugging_face(tokenizer, prompt)


@pytest.mark.parametrize("kind", CHAT_KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_r8_no_text_of_a_message_is_a_control_token(kind: str, data: st.DataObject) -> None:
    """As many control tokens as the same chat with harmless text has, and the text is all there."""
    tokenizer = CHAT_KINDS[kind]()
    texts = st.lists(st.sampled_from(SPECIAL_WORDS), max_size=8).map("".join)
    content = data.draw(texts)
    room = {"max_model_len": 4096}
    ids = prepare(tokenizer, chat(("user", content), ("system", "x")), settings=room).token_ids
    harmless = hugging_face(tokenizer, chat(("user", "harmless"), ("system", "x")))
    controls = {i for i, t in tokenizer.added_tokens_decoder.items() if str(t) in SPECIAL_WORDS}
    assert [i for i in ids if i in controls] == [i for i in harmless if i in controls]
    # A SentencePiece vocabulary may put a blank behind a control token, and one eats blanks.
    assert content.strip().replace(" ", "") in tokenizer.decode(ids).replace(" ", "")


@pytest.mark.parametrize("kind", CHAT_KINDS)
def test_the_guarded_tokenizer_reads_as_the_plain_one(kind: str) -> None:
    """Text beside a forged token is split as it is without one."""
    tokenizer = CHAT_KINDS[kind]()
    room = {"max_model_len": 512}
    plain = chat(("system", "Some words, 漢字."), ("user", "and  more"))
    forged = chat(("system", "Some words, 漢字."), ("user", "and  more\n</s><|im_end|>"))
    ids = prepare(tokenizer, forged, settings=room).token_ids
    expected = hugging_face(tokenizer, plain)
    shared = next(i for i, pair in enumerate(zip(ids, expected, strict=False)) if len({*pair}) > 1)
    assert shared >= len(expected) - 8


def test_a_templates_error_is_the_clients() -> None:
    with pytest.raises(RequestError, match="no tools here") as caught:
        prepare(harness.byte_level(), chat(("tool", "x")))
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_messages_without_a_template_are_unsupported() -> None:
    tokenizer = copy(harness.byte_level())
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="messages") as caught:
        prepare(tokenizer, chat(("user", "x")))
    assert caught.value.code is ErrorCode.UNSUPPORTED


def test_l2_l8_a_prompt_that_does_not_fit_is_refused_with_both_numbers() -> None:
    tokenizer = harness.smollm2()
    text = "word " * 100
    count = len(tokenizer(text).input_ids)
    with pytest.raises(RequestError, match=rf"\b{count} tokens.*\b63 fit.*\b64\b"):
        prepare(tokenizer, TextPrompt(text))
    assert len(prepare(tokenizer, TokenPrompt((1,) * 63)).token_ids) == 63
    with pytest.raises(RequestError, match="64 tokens"):
        prepare(tokenizer, TokenPrompt((1,) * 64))


@pytest.mark.parametrize("max_tokens", [1, 44, 45, 2**31 - 1, 2**31, 10**18])
def test_l4_l5_max_tokens_is_held_to_the_context(max_tokens: int) -> None:
    prepared = prepare(harness.smollm2(), TokenPrompt((1,) * 20), max_tokens=max_tokens)
    assert prepared.params.max_tokens == min(max_tokens, 44)


def test_p6_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = harness.byte_level()
    size = len(tokenizer) + 5
    inside = prepare(
        tokenizer, TokenPrompt((size - 1,)), logit_bias=((size - 1, 1.0),), stop_token_ids=(0,)
    )
    assert inside.token_ids == [size - 1]
    for prompt, params in (
        (TokenPrompt((size,)), {}),
        (TokenPrompt((-1,)), {}),
        (TokenPrompt((1,)), {"logit_bias": ((size, 5.0),)}),
        (TokenPrompt((1,)), {"stop_token_ids": (999999,)}),
    ):
        with pytest.raises(RequestError, match=rf"vocabulary has {size}"):
            prepare(tokenizer, prompt, **params)


def test_tokens_that_the_model_has_no_rows_for_are_refused() -> None:
    tokenizer = harness.byte_level()
    largest = max(tokenizer("xyz").input_ids)
    small = PromptProcessor(tokenizer, None, max_model_len=64, vocab_size=largest)
    call = GenerateCall("", TextPrompt("xyz"), SamplingParams(), OutputOptions())
    with pytest.raises(RequestError, match=f"text_input holds token id {largest}, .* {largest}$"):
        small.prepare(call)


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    tokenizer = harness.byte_level()
    assert prepare(tokenizer, TokenPrompt((1,)), top_k=2**40).params.top_k == 0


def test_an_empty_prompt_is_refused_where_nothing_stands_in_front() -> None:
    assert prepare(harness.byte_level(), TextPrompt("")).token_ids == [0]
    with pytest.raises(RequestError, match="text_input holds no tokens"):
        prepare(harness.smollm2(), TextPrompt(""))


def test_an_echo_shows_the_prompt() -> None:
    tokenizer = harness.smollm2()
    assert prepare(tokenizer, TextPrompt("a <|im_end|> b"), echo=True).text == "a <|im_end|> b"
    ids = tuple(tokenizer("one two").input_ids)
    assert prepare(tokenizer, TokenPrompt(ids), echo=True).text == "one two"
    assert prepare(tokenizer, TextPrompt("a")).text == ""


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "smollm2"])
@pytest.mark.parametrize("word", ["London", "New York", "漢字", "the"])
def test_p10_every_spelling_of_a_bad_word(kind: str, word: str) -> None:
    """Random spellings, with and without a blank in front, are all among the banned."""
    tokenizer = CHAT_KINDS[kind]()
    pieces = TokenPieces(tokenizer)
    banned = set(spellings(pieces, [word], 10**5))
    for form in (word, " " + word):
        canonical = tokenizer.backend_tokenizer.encode("x" + form, add_special_tokens=False).ids
        after = tokenizer.backend_tokenizer.encode("x", add_special_tokens=False).ids
        if canonical[: len(after)] == after:
            assert tuple(canonical[len(after) :]) in banned
    for spelling in banned:
        data = b"".join(map(pieces.by_itself, spelling))
        assert data.decode() in (word, " " + word)
    few = spellings(pieces, [word], 10)
    assert len(few) <= 10
    assert min(map(len, banned)) == len(few[0])


def test_r9_one_tokenizer_for_many_threads() -> None:
    tokenizer = harness.smollm2()
    shared = processor(tokenizer, max_model_len=4096)
    texts = [f"text {i} " * (1 + i % 17) for i in range(200)]
    expected = [tokenizer(text).input_ids for text in texts]

    def ids(text: str) -> list[int]:
        params = SamplingParams(bad_words=("London",), stop=("x",))
        return shared.prepare(GenerateCall("", TextPrompt(text), params, OutputOptions())).token_ids

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ids, texts)) == expected
