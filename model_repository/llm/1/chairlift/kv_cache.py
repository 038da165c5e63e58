"""The paged KV cache's books: which block holds what, who uses it, and which prefix it can serve.

Plain integers only; the tensors belong to the attention backend. A block is *used*, by one request
or by several that share it, or *free*. Free does not mean empty: a free block keeps its contents
and stays findable by its prefix until it is handed out again. Block 0 is the null block: padding
points to it and nobody owns it.

Prefix sharing is a chain of exact keys. A full block is known by ``(parent, tokens)``, where
``parent`` is the chain id of the block before it, or the cache salt for the first one. The
dictionary compares the token ids whenever it finds a key, and the parent's id was found the same
way, so equal keys mean equal prefixes whatever the hash function does. No chain id is used twice.

Only full blocks are findable, and nobody writes to a full block. An unfinished block is shared only
by forks, and whoever writes to it first while others hold it gets a copy (``take_copies``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from .request import Request

NULL_BLOCK = 0
ChainId = int | str
BlockKey = tuple[ChainId, tuple[int, ...]]


class PrefixHit(NamedTuple):
    """Cached blocks that continue what a request holds, and their chain ids."""

    block_ids: Sequence[int]
    chain: Sequence[int]


class BlockCopy(NamedTuple):
    """The contents of ``source`` must be in ``target`` before the next forward writes anything."""

    source: int
    target: int


NO_HIT = PrefixHit((), ())


class KVCacheManager:
    """Allocates, shares, frees, and evicts blocks of ``block_size`` tokens.

    Append-only block tables, least recently used blocks evicted first and of one request its tail
    first, blocks findable from the moment they are allocated: the structure is vLLM's. It counts
    on the attention backend to write a layer's keys and values for a whole step before it reads
    any, so that rows of one step can share what one of them computes.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks is {num_blocks}; one null block and one usable are needed"
            )
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._chain_ids = [0] * num_blocks
        self._findable: dict[BlockKey, int] = {}
        self._next_chain_id = count(1)
        self._free_empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()
        self._copies: list[BlockCopy] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached contents or not."""
        return len(self._free_empty) + len(self._free_cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose contents can still serve a prefix."""
        return len(self._free_cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_sharers(self, block_id: int) -> int:
        """How many running requests use this block."""
        return self._ref_counts[block_id]

    def shared_prefix(self, request: Request) -> list[int]:
        """The leading full blocks of ``request`` that others use as well."""
        shared = []
        for block in request.block_ids[: request.num_computed // self.block_size]:
            if self._ref_counts[block] < 2:
                break
            shared.append(block)
        return shared

    # ---------------------------------------------------------------- prefix sharing

    def num_findable_tokens(self, request: Request) -> int:
        """Tokens of ``request`` that are in the cache already."""
        return len(self.find_prefix(request).block_ids) * self.block_size

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached continuation of the full blocks that ``request`` holds.

        Never its last token, which must be computed for the logits, and nothing at all where
        prompt log-probabilities are wanted, since no logits exist for cached tokens. Reads only;
        nothing is reserved until ``allocate`` is given the hit.
        """
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return NO_HIT
        size, chain, token_ids = self.block_size, request.prefix_chain, request.token_ids
        found: list[int] = []
        found_chain: list[int] = []
        parent: ChainId = chain[-1] if chain else request.cache_salt
        for start in range(len(chain) * size, request.num_tokens - size, size):
            block = self._findable.get((parent, tuple(token_ids[start : start + size])))
            if block is None:
                break
            parent = self._chain_ids[block]
            found.append(block)
            found_chain.append(parent)
        return PrefixHit(found, found_chain)

    def _make_findable(self, request: Request, num_tokens: int) -> None:
        """Enter every block that ``num_tokens`` fill, unless its prefix is known already."""
        size, chain = self.block_size, request.prefix_chain
        for index in range(len(chain), num_tokens // size):
            parent: ChainId = chain[-1] if chain else request.cache_salt
            key = (parent, tuple(request.token_ids[index * size : (index + 1) * size]))
            block = self._findable.get(key)
            if block is None:
                block = request.block_ids[index]
                self._findable[key] = block
                self._keys[block] = key
                self._chain_ids[block] = next(self._next_chain_id)
            chain.append(self._chain_ids[block])

    def _make_unfindable(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._findable[key]
            self._keys[block] = None

    def forget(self, request: Request, num_valid_tokens: int) -> None:
        """Make blocks beyond ``num_valid_tokens`` unfindable: the step that fills them failed."""
        chain = request.prefix_chain
        first_bad = num_valid_tokens // self.block_size
        for block, chain_id in zip(request.block_ids[first_bad:], chain[first_bad:], strict=False):
            if self._chain_ids[block] == chain_id:
                self._make_unfindable(block)
        del chain[first_bad:]
        request.num_granted = num_valid_tokens

    # ---------------------------------------------------------------- allocate and free

    def allocate(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT) -> bool:
        """Give ``request`` blocks for ``num_new_tokens`` more; False, changing nothing, if full.

        ``hit`` comes from ``find_prefix`` and counts as computed. Those of its blocks that are free
        now leave the free list too, so they count against it.
        """
        num_hit = len(hit.block_ids)
        num_tokens = request.num_computed + num_hit * self.block_size + num_new_tokens
        num_new = max(0, self.blocks_for(num_tokens) - len(request.block_ids) - num_hit)
        revived = sum(self._ref_counts[block] == 0 for block in hit.block_ids) if num_hit else 0
        shares_tail = self._shares_tail(request)
        if num_new + revived + shares_tail > self.num_free:
            return False
        if num_hit:
            self._share(hit.block_ids)
            request.block_ids += hit.block_ids
            request.prefix_chain += hit.chain
        if shares_tail:
            self._copy_tail(request)
        for _ in range(num_new):
            request.block_ids.append(self._take_free())
        self._grant(request, num_tokens)
        return True

    def _grant(self, request: Request, num_tokens: int) -> None:
        """Note up to where ``request`` may write before it must ask again.

        That is the end of its last block, or one token less: the write that fills a block is
        announced, so that the block becomes findable.
        """
        end = len(request.block_ids) * self.block_size
        if not self.prefix_caching:
            request.num_granted = end
            return
        self._make_findable(request, num_tokens)
        request.num_granted = end if num_tokens == end else end - 1

    def _share(self, block_ids: Iterable[int]) -> None:
        for block in block_ids:
            if self._ref_counts[block] == 0:
                del self._free_cached[block]
            self._ref_counts[block] += 1

    def _take_free(self) -> int:
        """An empty block if there is one, else the least recently used of the cached ones."""
        if self._free_empty:
            block = self._free_empty.pop()
        else:
            block, _ = self._free_cached.popitem(last=False)
            self._make_unfindable(block)
            self.num_evictions += 1
        self._ref_counts[block] = 1
        return block

    def free(self, request: Request) -> None:
        """Return the request's blocks, tail first, so that its head is evicted last."""
        for block in reversed(request.block_ids):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._keys[block] is None:
                    self._free_empty.append(block)
                else:
                    self._free_cached[block] = None
        request.block_ids.clear()
        request.prefix_chain.clear()
        request.num_granted = 0

    # ---------------------------------------------------------------- forks

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child`` continue from all that ``parent`` has computed; needs no free block yet.

        They share the unfinished tail as well, until one of them writes to it.
        """
        num_held = self.blocks_for(parent.num_computed)
        child.block_ids = parent.block_ids[:num_held]
        child.prefix_chain = list(parent.prefix_chain)
        child.num_computed = parent.num_computed
        self._share(child.block_ids)
        parent.num_granted = child.num_granted = parent.num_computed

    def take_copies(self) -> list[BlockCopy]:
        """The copies that became due since the last call; no target is another one's source."""
        copies, self._copies = self._copies, []
        return copies

    def _shares_tail(self, request: Request) -> bool:
        """Whether the block that ``request`` writes to next is unfinished and not its own."""
        tail, in_tail = divmod(request.num_computed, self.block_size)
        return in_tail > 0 and self._ref_counts[request.block_ids[tail]] > 1

    def _copy_tail(self, request: Request) -> None:
        tail = request.num_computed // self.block_size
        copy = BlockCopy(request.block_ids[tail], self._take_free())
        self._ref_counts[copy.source] -= 1
        request.block_ids[tail] = copy.target
        self._copies.append(copy)

    # ---------------------------------------------------------------- proof

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the books agree with the block tables of ``requests``."""
        held = [0] * len(self._ref_counts)
        for request in requests:
            for block in request.block_ids:
                held[block] += 1
        if held != self._ref_counts:
            wrong = [b for b, refs in enumerate(self._ref_counts) if refs != held[b]]
            raise AssertionError(f"blocks {wrong}: reference counts differ from the block tables")
        if held[NULL_BLOCK]:
            raise AssertionError("the null block was handed out")
        free = sorted([*self._free_empty, *self._free_cached])
        if free != [b for b, refs in enumerate(held) if refs == 0 and b != NULL_BLOCK]:
            raise AssertionError(f"the free blocks are {free}, which the block tables contradict")
        if any(self._keys[block] for block in self._free_empty) or not all(
            self._keys[block] for block in self._free_cached
        ):
            raise AssertionError("a free block is on the wrong list")
        if self._findable != {key: b for b, key in enumerate(self._keys) if key is not None}:
            raise AssertionError("the prefix map and the blocks' keys differ")
