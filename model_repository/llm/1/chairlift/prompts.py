"""What a call brings as its prompt -> token ids, checked against the model's limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from chairlift.bad_words import Spelling, spellings
from chairlift.calls import ChatPrompt, GenerateCall, Prompt, TextPrompt
from chairlift.chat import ChatFormatter
from chairlift.errors import RequestError
from chairlift.request import SamplingParams
from chairlift.token_pieces import TokenPieces

# All spellings of words of up to seven letters ("London" has 73 in SmolLM2's vocabulary); of longer
# words those of the fewest tokens, which are the likely ones.
_SPELLINGS_PER_WORD = 256


class PreparedPrompt(NamedTuple):
    """A prompt that fits; ``params`` are held to the context and the vocabulary.

    ``text`` is what an echo shows, empty where none is asked for.
    """

    token_ids: list[int]
    params: SamplingParams
    bad_word_ids: tuple[Spelling, ...]
    text: str


class PromptProcessor:
    """The tokenizer's side of a request; nothing is changed after construction, so that any number
    of threads may use it (a fast tokenizer of transformers, called as such, sets its padding and
    truncation at every call and then raises `Already borrowed`)."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        *,
        max_model_len: int,
        vocab_size: int,
        add_special_tokens: bool = True,
    ) -> None:
        """``vocab_size`` is the model's, which may be padded beyond the tokenizer's."""
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bos_id: int | None = tokenizer.bos_token_id
        self._chat = ChatFormatter(tokenizer, chat_template)
        self._pieces = TokenPieces(tokenizer)
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._add_special_tokens = add_special_tokens

    def prepare(self, call: GenerateCall) -> PreparedPrompt:
        """Raises `RequestError` for ids outside the vocabulary and for prompts that do not fit."""
        params = call.params
        self._check_ids("logit_bias", (token_id for token_id, _ in params.logit_bias))
        self._check_ids("stop_token_ids", params.stop_token_ids)
        token_ids = self._token_ids(call.prompt)
        room = self._max_model_len - len(token_ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but at most {self._max_model_len - 1} fit"
                f" (max_model_len {self._max_model_len}, one of them for the answer)"
            )
        if params.max_tokens > room or params.top_k >= self._vocab_size:
            params = replace(
                params,
                max_tokens=min(params.max_tokens, room),
                top_k=params.top_k if params.top_k < self._vocab_size else 0,
            )
        words = spellings(self._pieces, params.bad_words, _SPELLINGS_PER_WORD)
        text = self._text(call, token_ids) if call.options.echo else ""
        return PreparedPrompt(token_ids, params, words, text)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, TextPrompt):
            name, token_ids = "text_input", self._encode(prompt.text)
        elif isinstance(prompt, ChatPrompt):
            name, token_ids = "messages", self._chat.token_ids(prompt.messages)
        else:
            name, token_ids = "input_ids", list(prompt.ids)
        if not token_ids:
            raise RequestError(f"{name} holds no tokens")
        # A tokenizer may know more tokens than the model has rows for: one would fail a step.
        self._check_ids(name, token_ids)
        return token_ids

    def _encode(self, text: str) -> list[int]:
        """As Hugging Face does, but with one BOS where the text already begins with it."""
        encoded = self._backend.encode(text, add_special_tokens=self._add_special_tokens)
        ids: list[int] = encoded.ids
        return ids[1:] if ids[:2] == [self._bos_id] * 2 and self._add_special_tokens else ids

    def _text(self, call: GenerateCall, token_ids: list[int]) -> str:
        if isinstance(call.prompt, TextPrompt):
            return call.prompt.text
        text: str = self._backend.decode(
            token_ids, skip_special_tokens=call.params.skip_special_tokens
        )
        return text

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{name} holds token id {token_id}, but the vocabulary has {self._vocab_size}"
                )
