"""Text comes out whole, in time, and cut where it should be; ids are of reported-faults.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.detokenizer import Detokenizer
from chairlift.token_pieces import TokenPieces
from tests.unit import tokenizer_harness as harness

KINDS = {
    "smollm2": harness.smollm2,
    "byte_level": harness.byte_level,
    "sentencepiece": harness.sentencepiece,
    "metaspace": harness.metaspace,
    "wordpiece": harness.wordpiece,
    "word_ends": harness.word_ends,
}
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
TEXTS = [
    "List three fruits: apples, bananas and cherries. Well done.\n\n",
    "def f(x):\n    if x:\n        return  1\n",
    "翻译成中文 🌶️🌶️ 漢字 हिन्दी 🏳️\u200d🌈 naïve café",
    "  two blanks in front, three behind   ",
]
LOST = "\N{REPLACEMENT CHARACTER}"


class Run(NamedTuple):
    chunks: list[str]
    stopped: bool
    num_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.chunks)


def run(
    tokenizer: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    sizes: Sequence[int] = (),
    **options: Any,
) -> Run:
    """Push the answer in parts of the given sizes, then one by one, until it ends or stops."""
    detokenizer = Detokenizer(TokenPieces(tokenizer), prompt, **options)
    chunks, taken, left = [], 0, list(sizes)
    while taken < len(answer):
        size = left.pop(0) if left else 1
        decoded = detokenizer.push(answer[taken : taken + size])
        chunks.append(decoded.text)
        taken += decoded.num_tokens
        if decoded.stopped:
            return Run([*chunks, detokenizer.finish()], True, taken)
    return Run([*chunks, detokenizer.finish()], False, taken)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def continuation(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int], skip: bool) -> str:
    """What the library's own decoding shows behind the prompt; a character that the prompt began
    and the answer completed belongs to the answer."""
    before = tokenizer.decode(list(prompt), skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *answer], skip_special_tokens=skip)
    return whole[len(before) :] if whole.startswith(before) else whole[len(before) - 1 :]


def id_lists(tokenizer: Any, max_size: int = 30) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(tokenizer) - 1), max_size=max_size)


SIZES = st.lists(st.integers(1, 9), max_size=12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_joined_chunks_equal_decoding_the_whole(kind: str, data: st.DataObject) -> None:
    """D1, D4: for any ids at all, grouped in any way, with and without special tokens."""
    tokenizer = KINDS[kind]()
    prompt, answer = data.draw(id_lists(tokenizer)), data.draw(id_lists(tokenizer))
    skip = data.draw(st.booleans())
    result = run(tokenizer, prompt, answer, data.draw(SIZES), skip_special_tokens=skip)
    assert result.num_tokens == len(answer)
    assert result.text == continuation(tokenizer, prompt, answer, skip)


def byte_runs_in_utf8(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether every run of byte tokens spells whole characters."""
    data = bytearray()
    for token in [*tokenizer.convert_ids_to_tokens(list(ids)), ""]:
        found = BYTE.fullmatch(token)
        if found:
            data.append(int(found[1], 16))
        elif token not in ("<s>", "</s>", "<|user|>", "<|assistant|>"):  # skipped
            if LOST in data.decode(errors="replace"):
                return False
            data.clear()
    return True


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_byte_fallback_equals_decoding_the_whole(data: st.DataObject) -> None:
    """Characters in single bytes between pieces of a vocabulary, as Llama 2 writes them."""
    tokenizer = harness.sentencepiece()
    characters = st.text(min_size=1, max_size=3).map(
        lambda text: tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])
    )
    parts = st.lists(st.one_of(characters, id_lists(tokenizer, 5)), max_size=12)
    answer = [token_id for part in data.draw(parts) for token_id in part]
    prompt = encode(tokenizer, data.draw(st.text(max_size=20)))
    result = run(tokenizer, prompt, answer, data.draw(SIZES))
    if byte_runs_in_utf8(tokenizer, [*prompt, *answer]):
        assert result.text == continuation(tokenizer, prompt, answer, skip=True)
    assert result.text == run(tokenizer, prompt, answer, [len(answer)]).text


def test_good_bytes_before_a_bad_one_are_kept() -> None:
    """Where the library gives up on the whole run of byte tokens, and has nothing to stream."""
    tokenizer = harness.sentencepiece()
    names = [f"<0x{byte:02X}>" for byte in "你".encode() + b"\xff"]
    answer = tokenizer.convert_tokens_to_ids(names)
    prompt = encode(tokenizer, "a")
    assert run(tokenizer, prompt, answer).chunks == ["", "", "你", LOST, ""]
    assert tokenizer.decode(prompt + answer) == "a" + LOST * 4


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "sentencepiece"])
def test_d1_d2_real_text_comes_back(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    prompt, answer = encode(tokenizer, "Repeat:"), encode(tokenizer, text)
    result = run(tokenizer, prompt, answer)
    assert result.text.strip(" ") == text.strip(" ")
    assert not any(chunk.endswith(LOST) for chunk in result.chunks)


def test_d2_a_cut_character_is_flushed_at_the_end() -> None:
    tokenizer = harness.byte_level()
    answer = encode(tokenizer, "ok 🌶")[:-1]
    result = run(tokenizer, encode(tokenizer, "x"), answer)
    assert result.chunks[-1] == LOST
    assert LOST not in "".join(result.chunks[:-1])


def test_d3_a_prompt_that_ends_inside_a_character() -> None:
    tokenizer = harness.byte_level()
    ids = encode(tokenizer, "Hello world 🌶 and more")
    cut = len(encode(tokenizer, "Hello world 🌶")) - 1
    assert run(tokenizer, ids[:cut], ids[cut:]).text == "🌶 and more"
    other = encode(tokenizer, "plain")
    assert run(tokenizer, ids[:cut], other).text == "plain"


@pytest.mark.parametrize("kind", ["smollm2", "byte_level", "sentencepiece"])
@pytest.mark.parametrize("ending", ["def f():\n", "A blank at the end ", "漢字"])
def test_d4_leading_blanks_stay(kind: str, ending: str) -> None:
    tokenizer = KINDS[kind]()
    prompt, answer = encode(tokenizer, ending), encode(tokenizer, "    return 1")
    text = run(tokenizer, prompt, answer).text
    assert text == continuation(tokenizer, prompt, answer, skip=True)
    assert text.startswith("    ")


def test_d6_a_stop_string_that_cannot_match_withholds_nothing() -> None:
    tokenizer = harness.smollm2()
    answer = encode(tokenizer, TEXTS[0] * 3)
    plain = run(tokenizer, [], answer)
    assert run(tokenizer, [], answer, stop=("@@@@END-OF-ANSWER@@@@",)) == plain
    assert "" not in plain.chunks[:-1]


@pytest.mark.parametrize("skip", [True, False])
def test_d8_special_tokens_are_skipped_or_shown(skip: bool) -> None:
    tokenizer = harness.smollm2()
    answer = encode(tokenizer, "Done<|im_end|> more")
    text = run(tokenizer, [5], answer, skip_special_tokens=skip).text
    assert text == ("Done more" if skip else "Done<|im_end|> more")


@pytest.mark.parametrize("word", ["K L M", " K L M", "\nK", "L"])
def test_s2_s6_stop_strings_match_the_text_not_the_ids(word: str) -> None:
    tokenizer = harness.smollm2()
    text = " H I J\nK L M N O P Q R"
    answer = encode(tokenizer, text if "\n" in word else text.replace("\n", " "))
    whole = run(tokenizer, [5], answer).text
    result = run(tokenizer, [5], answer, stop=(word,))
    assert result.text == whole[: whole.index(word)]
    assert result.stopped
    assert result.num_tokens < len(answer)


def test_s4_text_withheld_for_nothing_is_sent_once() -> None:
    tokenizer = harness.smollm2()
    answer = encode(tokenizer, "my friend Alice, and Alice again")
    result = run(tokenizer, [5], answer, stop=("Alice!", "and Bob"))
    assert result.text == "my friend Alice, and Alice again"
    assert not result.stopped


def test_s8_text_is_cut_at_the_character() -> None:
    tokenizer = harness.smollm2()
    answer = encode(tokenizer, "wait ... and more")
    dots = next(token for token in tokenizer.convert_ids_to_tokens(answer) if "..." in token)
    assert len(dots) > 2
    assert run(tokenizer, [5], answer, [len(answer)], stop=("..",)).text == "wait "
    kept = run(tokenizer, [5], answer, [len(answer)], stop=("..",), include_stop=True)
    assert kept.text == "wait .."


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_stop_string_complete_first_wins(data: st.DataObject) -> None:
    """Against a search of the whole text, with `min_tokens` and any grouping of the tokens."""
    tokenizer = harness.byte_level()
    answer = encode(tokenizer, data.draw(st.text(st.sampled_from("ab -é漢"), max_size=24)))
    stops = st.text(st.sampled_from("ab -é漢"), min_size=1, max_size=4)
    stop = tuple(data.draw(st.lists(stops, min_size=1, max_size=3)))
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 3]))
    include = data.draw(st.booleans())
    whole = run(tokenizer, [5], answer)
    immune = len("".join(whole.chunks[:min_tokens]))
    result = run(
        *(tokenizer, [5], answer, data.draw(SIZES)),
        **{"stop": stop, "include_stop": include, "min_tokens": min_tokens},
    )
    matches = [
        (start + len(each), start)
        for each in stop
        for start in range(len(whole.text))
        if whole.text.startswith(each, start) and start + len(each) > immune
    ]
    assert result.stopped == bool(matches)
    if matches:
        end, start = min(matches)
        assert result.text == whole.text[: end if include else start]
        ends = [len("".join(whole.chunks[: count + 1])) for count in range(len(answer))]
        assert result.num_tokens == next(i for i, size in enumerate(ends, 1) if size >= end)
    else:
        assert result.text == whole.text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_only_the_beginning_of_a_stop_string_is_withheld(data: st.DataObject) -> None:
    tokenizer = harness.byte_level()
    answer = encode(tokenizer, data.draw(st.text(st.sampled_from("abc"), max_size=24)))
    stop = tuple(data.draw(st.lists(st.text("abc", min_size=5, max_size=6), min_size=1)))
    plain, held = run(tokenizer, [5], answer), run(tokenizer, [5], answer, stop=stop)
    for count in range(1, held.num_tokens + (not held.stopped)):
        shown = "".join(held.chunks[:count])
        due = "".join(plain.chunks[:count])
        assert due.startswith(shown)
        rest = due[len(shown) :]
        assert not rest or any(each.startswith(rest) and each != rest for each in stop)


def test_ids_beyond_the_tokenizer_add_nothing() -> None:
    """A model's vocabulary may be padded."""
    tokenizer = harness.smollm2()
    answer = [*encode(tokenizer, "a"), len(tokenizer) + 7, *encode(tokenizer, " b")]
    assert run(tokenizer, [5], answer).text == "a b"


def test_a_token_by_itself_keeps_its_blank() -> None:
    """Reports of log-probabilities; joined they are the text."""
    for kind in ("smollm2", "byte_level", "sentencepiece"):
        tokenizer = KINDS[kind]()
        pieces = TokenPieces(tokenizer)
        answer = encode(tokenizer, "one two three")
        text = "".join(map(pieces.text, answer))
        assert text == run(tokenizer, [5, 6], answer).text
