"""Every way that a vocabulary can spell a word that must not be said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from chairlift.token_pieces import TokenPieces

Spelling = tuple[int, ...]


def spellings(pieces: TokenPieces, words: Iterable[str], at_most: int) -> tuple[Spelling, ...]:
    """Token sequences that spell one of the words, with or without a blank in front.

    Banning only the tokenizer's own spelling lets a model say ``Lon`` + ``don``. Those with the
    fewest tokens come first, ``at_most`` of each word: long words have thousands.
    """
    found: dict[Spelling, None] = {}
    for word in words:
        core = word.strip() or word
        forms = [pieces.lattice(form.encode()) for form in (core, " " + core)]
        for form in forms:
            found |= dict.fromkeys(_shortest_first(form, at_most // len(forms)))
    return tuple(found)


def _shortest_first(lattice: Sequence[dict[int, list[int]]], at_most: int) -> Iterator[Spelling]:
    """Paths through a lattice, those of fewest tokens first.

    ``lattice[start][end]`` holds the ids of tokens that spell the bytes from start to end.
    """
    size = len(lattice)
    fewest = [0] * (size + 1)  # tokens needed from a place to the end; size + 1 for no way
    for start in reversed(range(size)):
        fewest[start] = min((1 + fewest[end] for end in lattice[start]), default=size + 1)

    def paths(start: int, length: int) -> Iterator[Spelling]:
        if start == size:
            yield ()
            return
        for end in sorted(lattice[start], reverse=True):
            rest = length - 1
            if fewest[end] <= rest <= size - end:
                for tail in paths(end, rest):
                    yield from ((token_id, *tail) for token_id in lattice[start][end])

    left = at_most
    for length in range(fewest[0], size + 1):
        for path in paths(0, length):
            if left == 0:
                return
            left -= 1
            yield path
