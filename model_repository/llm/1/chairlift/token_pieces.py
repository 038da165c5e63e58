"""What each token adds to a text: the one place that knows how a tokenizer spells."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

# A byte that is no character by itself, as byte-fallback vocabularies write it.
_BYTE_TOKEN = re.compile(r"<0x([89A-Fa-f][0-9A-Fa-f])>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 is its own byte, the rest start at U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class TokenPieces:
    """Token id -> the bytes it adds behind other text.

    Working in bytes makes streaming exact at constant cost: a character spread over several tokens
    is a matter for an incremental UTF-8 decoder, not for decoding a window again and again. A
    decoder that is not byte level is asked what a token adds behind the one before it, so that a
    leading blank, which it would strip from a token alone, is kept. One table serves all requests.
    """

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: a fast tokenizer of transformers, or a plain `tokenizers.Tokenizer`."""
        self._tokenizer: Tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        decoder = self._tokenizer.decoder
        kinds = _decoder_types(json.loads(decoder.__getstate__()) if decoder else {})
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._letters = {byte: letter for letter, byte in (self._alphabet or {}).items()}
        self._byte_fallback = "ByteFallback" in kinds
        # These look at a token's neighbours, so that a piece holds for one pair of tokens only.
        self._local = not kinds & {"BPEDecoder", "CTC"}
        self._pieces: dict[int, bytes] = {}
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # Any text to stand in front of a token whose text is wanted by itself.
        self._anchor: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]

    def piece(self, token_id: int, previous: int | None) -> bytes:
        """What ``token_id`` adds behind ``previous``; ``None`` is the very start of a text.

        An id that the tokenizer does not know (a padded vocabulary) adds nothing.
        """
        if self._alphabet is None and previous is None:
            return self._make(token_id, [])
        if self._local or previous is None:
            return self.by_itself(token_id)
        return self._make(token_id, [previous])

    def by_itself(self, token_id: int) -> bytes:
        """What a token adds behind some plain text."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make(token_id, self._anchor)
        return piece

    def text(self, token_id: int) -> str:
        """A token as reports of log-probabilities show it."""
        return self.by_itself(token_id).decode(errors="replace")

    def lattice(self, data: bytes) -> list[dict[int, list[int]]]:
        """For every start, the ends reached by one token, and the ids of the tokens between."""
        ends = range(1, len(data) + 1)
        lattice = []
        for start in range(len(data)):
            spelled = {end: self._spelling(data[start:end]) for end in ends if end > start}
            lattice.append({end: ids for end, ids in spelled.items() if ids})
        return lattice

    def _spelling(self, data: bytes) -> list[int]:
        """Ordinary tokens that add exactly these bytes."""
        if self._alphabet is not None:
            names = ["".join(self._letters[byte] for byte in data)]
        else:
            text = data.decode(errors="replace")
            names = [
                text.replace(" ", "\N{LOWER ONE EIGHTH BLOCK}"),
                text,
                text.strip(),
                "##" + text,
            ]
            names += [f"<0x{data[0]:02X}>"] * (len(data) == 1)
        found = {self._tokenizer.token_to_id(name) for name in names}
        ids = {token_id for token_id in found if token_id is not None} - self.special_ids
        return sorted(token_id for token_id in ids if self.by_itself(token_id) == data)

    def _make(self, token_id: int, before: list[int]) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            # As the library's own decoder: a token with any other character stands for itself.
            known = [self._alphabet.get(character) for character in token]
            return token.encode() if None in known else bytes(b for b in known if b is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte:
            return bytes([int(byte[1], 16)])
        return self._decode([*before, token_id])[len(self._decode(before)) :].encode()

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _decoder_types(state: Any) -> frozenset[str]:
    """Type names in a decoder's JSON, at any depth."""
    if isinstance(state, list):
        return frozenset().union(*map(_decoder_types, state))
    if not isinstance(state, dict):
        return frozenset()
    inner = frozenset().union(*(_decoder_types(value) for value in state.values()))
    return inner | ({state["type"]} if "type" in state else frozenset())
