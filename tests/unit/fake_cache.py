"""What the device's KV cache would hold, as an oracle for the block manager's books."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift.kv_cache import NULL_BLOCK, BlockCopy
from chairlift.request import Request


class ConstantHash(int):
    """A token id that collides with every other one in a dictionary (K4)."""

    def __hash__(self) -> int:
        return 7


class FakeCache:
    """Slots that remember which prefix, ending with which token, was written to them.

    A real key or value depends on its token and on all tokens before it, so each prefix gets a
    number and a slot holds the number of the prefix that ends there.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._prefixes: dict[int, list[int]] = {}

    def prefixes(self, request: Request, length: int) -> list[int]:
        """The numbers of the first ``length`` prefixes of ``request``."""
        known = self._prefixes.setdefault(request.uid, [])
        for position in range(len(known), length):
            parent: int | str = known[-1] if known else request.cache_salt
            key = (parent, int(request.token_ids[position]))
            known.append(self._numbers.setdefault(key, len(self._numbers)))
        return known[:length]

    def slot(self, request: Request, position: int) -> int:
        index, offset = divmod(position, self.block_size)
        block = request.block_ids[index]
        assert block != NULL_BLOCK
        return block * self.block_size + offset

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies run in no particular order, so none may touch another's target."""
        targets = [copy.target for copy in copies]
        assert len(set(targets)) == len(targets)
        assert not {copy.source for copy in copies} & set(targets)
        size = self.block_size
        for source, target in copies:
            self.slots[target * size : (target + 1) * size] = self.slots[
                source * size : (source + 1) * size
            ]

    def write(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """Write ``num_tokens`` from ``start`` of each request; no slot twice in one step."""
        written: set[int] = set()
        for request, start, num_tokens in rows:
            numbers = self.prefixes(request, start + num_tokens)
            for position in range(start, start + num_tokens):
                slot = self.slot(request, position)
                assert slot not in written, f"two rows of one step write to slot {slot}"
                written.add(slot)
                self.slots[slot] = numbers[position]

    def spoil(self, rows: Iterable[tuple[Request, int, int]]) -> None:
        """A step that failed may have left anything in the slots that it was to write."""
        for request, start, num_tokens in rows:
            for position in range(start, start + num_tokens):
                self.slots[self.slot(request, position)] = None

    def check(self, request: Request) -> None:
        """Everything computed for ``request`` is what its block table leads to."""
        length, size = request.num_computed, self.block_size
        found: list[int | None] = []
        for block in request.block_ids:
            found += self.slots[block * size : (block + 1) * size]
        assert found[:length] == self.prefixes(request, length), (
            f"request {request.uid} reads something else than it has written"
        )
