"""The paged KV cache's books: which block holds what, who uses it, and which prefix it can serve.

Plain integers only; the tensors belong to the attention backend. A block is *used* (reference
count above zero), or *free*. A free block keeps its contents until it is handed out again, so a
finished request's full blocks stay findable: free does not mean empty. Block 0 is the null block:
padding points to it and nobody owns it.

Prefix sharing is a chain of exact keys. A full block is known by ``(parent, tokens)``, where
``parent`` is the chain id of the block before it (the cache salt, for the first one). The dictionary
compares the token ids whenever it finds a key, and the parent's id was found the same way, so equal
keys mean equal prefixes whatever the hash function does.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from .request import Request

NULL_BLOCK = 0
ChainId = int | str
BlockKey = tuple[ChainId, tuple[int, ...]]


class PrefixHit(NamedTuple):
    """The longest cached prefix of a request, in whole blocks and their chain ids."""

    block_ids: list[int]
    chain: list[int]


class BlockCopy(NamedTuple):
    """The contents of ``source`` must be copied to ``target`` before the next step's forward."""

    source: int
    target: int


NO_HIT = PrefixHit([], [])


class KVCacheManager:
    """Allocates, shares, frees, and evicts blocks of ``block_size`` tokens.

    Structure after vLLM's KV cache manager (append-only block tables, LRU order with tail blocks
    first, registering at allocation so that requests of the same step can share).
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; one null block and one usable are needed")
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._chain_ids = [0] * num_blocks
        self._cached: dict[BlockKey, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._next_chain_id = count(1)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached contents or not."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose contents could still serve a prefix."""
        return sum(self._keys[block] is not None for block in self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_shared(self, block_id: int) -> int:
        """How many running requests use this block."""
        return self._ref_counts[block_id]

    # ---------------------------------------------------------------- prefix sharing

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, at most ``num_tokens - 1``: the last token is always computed.

        Reads only; nothing is reserved until ``allocate`` is given the hit.
        """
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return NO_HIT
        hit = PrefixHit([], [])
        size = self.block_size
        parent: ChainId = request.cache_salt
        for start in range(0, request.num_tokens - size, size):
            block = self._cached.get((parent, tuple(request.token_ids[start : start + size])))
            if block is None:
                break
            parent = self._chain_ids[block]
            hit.block_ids.append(block)
            hit.chain.append(parent)
        return hit

    def _register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Make every block that ``num_tokens`` fill findable under its key."""
        size = self.block_size
        chain = request.prefix_chain
        for index in range(len(chain), num_tokens // size):
            parent: ChainId = chain[-1] if chain else request.cache_salt
            key = (parent, tuple(request.token_ids[index * size : (index + 1) * size]))
            known = self._cached.get(key)
            if known is None:
                known = request.block_ids[index]
                self._cached[key] = known
                self._keys[known] = key
                self._chain_ids[known] = next(self._next_chain_id)
            chain.append(self._chain_ids[known])

    def _unregister(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None

    # ---------------------------------------------------------------- allocate and free

    def allocate(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT) -> bool:
        """Give ``request`` blocks for its next ``num_new_tokens``; False, changing nothing, if full.

        ``hit`` comes from ``find_prefix`` and counts as computed. Its blocks that are free now leave
        the free list too, so they count against it.
        """
        block_ids = request.block_ids
        num_tokens = request.num_computed + len(hit.block_ids) * self.block_size + num_new_tokens
        num_new = self.blocks_for(num_tokens) - len(block_ids) - len(hit.block_ids)
        revived = sum(self._ref_counts[block] == 0 for block in hit.block_ids)
        if num_new + revived > len(self._free):
            return False
        if hit.block_ids:
            self._share(hit.block_ids)
            block_ids.extend(hit.block_ids)
            request.prefix_chain.extend(hit.chain)
        for _ in range(num_new):
            block_ids.append(self._take_free())
        if self.prefix_caching:
            self._register_full_blocks(request, num_tokens)
        return True

    def _share(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def _take_free(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._keys[block] is not None:
            self._unregister(block)
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def free(self, request: Request) -> None:
        """Return the request's blocks: findable ones to the back of the free list (least recently
        used goes first, tail before head), others to the front, where they displace nothing."""
        for block in reversed(request.block_ids):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if self._keys[block] is None:
                    self._free.move_to_end(block, last=False)
        request.block_ids.clear()
        request.prefix_chain.clear()

    def forget(self, request: Request, num_valid_tokens: int) -> None:
        """Make blocks beyond ``num_valid_tokens`` unfindable: their step was taken back or failed."""
        first = num_valid_tokens // self.block_size
        for index in range(first, len(request.prefix_chain)):
            block = request.block_ids[index]
            if self._keys[block] and self._chain_ids[block] == request.prefix_chain[index]:
                self._unregister(block)
        del request.prefix_chain[first:]

    def fork(self, parent: Request, child: Request) -> BlockCopy | bool:
        """Let ``child`` continue from ``parent``'s computed tokens: share full blocks, copy the tail.

        Returns the copy to make, True where there is no unfinished block, False (and no change) if
        there is no free block for it.
        """
        num_full, in_tail = divmod(parent.num_computed, self.block_size)
        if in_tail and not self._free:
            return False
        self._share(parent.block_ids[:num_full])
        child.block_ids = parent.block_ids[:num_full]
        child.prefix_chain = parent.prefix_chain[:num_full]
        child.num_computed = parent.num_computed
        if not in_tail:
            return True
        target = self._take_free()
        child.block_ids.append(target)
        return BlockCopy(parent.block_ids[num_full], target)

    # ---------------------------------------------------------------- proof

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the books agree with the block tables of ``requests``."""
        held = Counter(block for request in requests for block in request.block_ids)
        for block, refs in enumerate(self._ref_counts):
            expected = held.get(block, 0)
            if refs != expected:
                raise AssertionError(f"block {block}: {refs} references, {expected} in the tables")
            if block != NULL_BLOCK and (refs == 0) != (block in self._free):
                raise AssertionError(f"block {block}: {refs} references but free list disagrees")
        if NULL_BLOCK in self._free or held.get(NULL_BLOCK):
            raise AssertionError("the null block was handed out")
        registered = {key: block for block, key in enumerate(self._keys) if key is not None}
        if registered != self._cached:
            raise AssertionError("the prefix map and the blocks' keys differ")
