"""Token ids of one answer -> text as it can be shown, cut at the first stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from chairlift.token_pieces import TokenPieces

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Decoded(NamedTuple):
    """Text to send now; of the pushed tokens, ``num_tokens`` belong to the answer: all of them, or
    those up to the one that completed a stop string."""

    text: str
    stopped: bool
    num_tokens: int


class Detokenizer:
    """Joined, the texts of `push` and `finish` are the answer, however the tokens are grouped.

    A character is withheld until its last byte is there, and a suffix only while it is a beginning
    of a stop string. The answer is what its tokens add behind the prompt: a first blank stays, and
    a character that the prompt began and the answer completes is shown.

    One thing differs from decoding the whole at once with a byte-fallback tokenizer (Llama 2): if a
    run of byte tokens turns out not to be UTF-8, that gives U+FFFD for every byte of the run, good
    characters before the fault included; here those have been shown and stay.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """``min_tokens``: a stop string completed by one of the first so many tokens is ignored."""
        self._pieces = pieces
        self._stop = stop
        self._include_stop = include_stop
        self._skipped = pieces.special_ids if skip_special_tokens else frozenset[int]()
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._utf8 = _Utf8Decoder("replace")
        self._previous: int | None = None
        self._pending = ""
        self._immune = 0  # characters of `_pending` that came from the first `min_tokens` tokens
        self._stopped = False
        self._owed = self._read_prompt(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> Decoded:
        """Take the next tokens of the answer; after a stop, nothing more may be pushed."""
        if not self._stop:
            return Decoded("".join(map(self._text, token_ids)), False, len(token_ids))
        for count, token_id in enumerate(token_ids, 1):
            self._pending += self._text(token_id)
            self._num_tokens += 1
            if self._num_tokens <= self._min_tokens:
                self._immune = len(self._pending)
            elif (end := self._stop_end()) is not None:
                text, self._pending, self._stopped = self._pending[:end], "", True
                return Decoded(text, True, count)
        return Decoded(self._release(), False, len(token_ids))

    def finish(self) -> str:
        """The withheld rest, when no more tokens come."""
        if self._stopped:
            return ""
        text, self._pending = self._pending + self._decode(b"", final=True), ""
        return text

    def _text(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._pieces.piece(token_id, self._previous)
        self._previous = token_id
        return self._decode(piece)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._owed and text:
            # The prompt ended inside a character; if it was not completed, U+FFFD is the prompt's.
            self._owed = False
            return text.removeprefix("\N{REPLACEMENT CHARACTER}")
        return text

    def _read_prompt(self, prompt_ids: Sequence[int]) -> bool:
        """Note what the answer continues; True if the prompt ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:
                break
            if token_id not in self._skipped:
                self._previous = token_id if self._previous is None else self._previous
                tail = self._pieces.by_itself(token_id) + tail
        self._utf8.decode(tail[-3:])  # an unfinished character of UTF-8 has three bytes at most
        return bool(self._utf8.getstate()[0])

    def _stop_end(self) -> int | None:
        """Where to cut the pending text: at the stop string that is complete first."""
        found = []
        for stop in self._stop:
            start = self._pending.find(stop, max(0, self._immune - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return end if self._include_stop else start

    def _release(self) -> str:
        """All pending text but the longest end that may still become a stop string."""
        keep = max((_overlap(self._pending, stop) for stop in self._stop), default=0)
        cut = len(self._pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        self._immune = max(0, self._immune - cut)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a true beginning of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
