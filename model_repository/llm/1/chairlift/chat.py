"""Chat messages -> token ids, with no way for a message's text to act as a control token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from chairlift.calls import Message
from chairlift.errors import ErrorCode, RequestError

# Noncharacters of Unicode: no text that is meant to be exchanged holds them.
_BREAK = "\U0010fffe"
_MARK = "\U0010ffff"
# Some checkpoints forget to flag their control tokens as special, but spell them like this.
_BETWEEN_BARS = re.compile(r"<[|\N{FULLWIDTH VERTICAL LINE}].*[|\N{FULLWIDTH VERTICAL LINE}]>")


class ChatFormatter:
    """Applies a chat template; ids equal those of transformers' ``apply_chat_template``.

    Where a message spells a control token, the two are told apart so: a mark is put inside the
    message's own, so that after rendering only the template's are whole; those are written as
    aliases, the marks are taken out, and a copy of the tokenizer reads the text that knows the
    aliases and takes control tokens for ordinary text. Nothing of a message is lost or reordered,
    and templates may trim, join and build control tokens from parts.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._template = template or _own_template(tokenizer)
        controls = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if len(token.content) > 1 and (token.special or _BETWEEN_BARS.fullmatch(token.content))
        }
        longest_first = sorted(map(re.escape, controls), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first) or "(?!)")
        self._guarded, self._originals = _guarded_copy(self._backend, controls)

    def token_ids(self, messages: Sequence[Message]) -> list[int]:
        """Rendered with the opening of the answer; a template's error is a `RequestError`."""
        if self._template is None:
            text = "messages: this model has no chat template"
            raise RequestError(text, ErrorCode.UNSUPPORTED)
        for i, message in enumerate(messages):
            if _BREAK in message.content or _MARK in message.content:
                raise RequestError(f"messages[{i}].content holds a noncharacter of Unicode")
        if not any(self._control.search(message.content) for message in messages):
            rendered = self._render(messages)
            ids: list[int] = self._backend.encode(rendered, add_special_tokens=False).ids
            return ids
        rendered = self._render([self._broken(message) for message in messages])
        aliased = self._control.sub(lambda found: _MARK + found[0] + _MARK, rendered)
        encoded = self._guarded.encode(aliased.replace(_BREAK, ""), add_special_tokens=False)
        return [self._originals.get(token_id, token_id) for token_id in encoded.ids]

    def _broken(self, message: Message) -> Message:
        text = self._control.sub(lambda found: found[0][0] + _BREAK + found[0][1:], message.content)
        return message._replace(content=text)

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [message._asdict() for message in messages],
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"messages: the chat template refuses them: {error}") from None
        return text


def _own_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _guarded_copy(
    backend: Tokenizer, controls: dict[str, int]
) -> tuple[Tokenizer, dict[int | None, int]]:
    """A tokenizer to which control tokens are text, and its aliases' ids -> the real ones."""
    added = backend.get_added_tokens_decoder()
    guarded = Tokenizer.from_str(backend.to_str())
    guarded.no_truncation()
    guarded.no_padding()
    guarded.add_special_tokens([added[token_id] for token_id in controls.values()])
    guarded.encode_special_tokens = True
    aliases = [_alias(added[token_id]) for token_id in controls.values()]
    guarded.add_tokens(aliases)
    originals = {guarded.token_to_id(_MARK + text + _MARK): i for text, i in controls.items()}
    return guarded, originals


def _alias(token: AddedToken) -> AddedToken:
    """The same token under another spelling: it takes the blanks beside it as the token does."""
    return AddedToken(
        _MARK + token.content + _MARK,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )
