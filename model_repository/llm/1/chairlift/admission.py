"""Memory-based admission: will everybody still fit when the batch is at its largest?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .kv_cache import KVCacheManager, PrefixHit
from .request import Request


def expected_remaining(request: Request, reserve_fraction: float) -> int:
    """Tokens that ``request`` is expected to generate yet, at least one."""
    total = request.num_prompt_tokens + reserve_fraction * request.params.max_tokens
    return max(1, int(total) - request.num_tokens)


def future_peak_blocks(
    kv: KVCacheManager,
    running: Sequence[Request],
    candidate: Request,
    hit: PrefixHit,
    reserve_fraction: float,
) -> int:
    """The largest number of blocks in use at once if ``candidate`` joins ``running``.

    Everybody generates one token per step and leaves after its expected remaining tokens. Usage is
    largest just before somebody leaves. With requests sorted so that the longest comes first, those
    alive when request i leaves (after t_i more tokens) are the first i + 1, and

        peak = max_i sum_{j <= i} (ceil((tokens_j + t_i) / block_size) - shared_j)

    where shared_j counts j's blocks that a longer-lived request holds as well: shared blocks count
    once and go with their last sharer. Idea: lightllm's estimate of the future peak, here in blocks.

    The sum of ceilings needs no inner loop: with a = (tokens + size - 1) // size and
    r = (tokens + size - 1) % size, ceil((tokens + t) / size) = a + t // size + [r >= size - t % size],
    and the last term is a count over at most ``size`` classes of r.
    """
    size = kv.block_size
    everyone = [*running, candidate]
    remaining = [expected_remaining(request, reserve_fraction) for request in everyone]
    order = sorted(range(len(everyone)), key=remaining.__getitem__, reverse=True)
    shared = _shared_with_longer_lived(kv, everyone, order, hit)

    steps = np.array([remaining[i] for i in order], dtype=np.int64)
    rounded = np.array([everyone[i].num_tokens + size - 1 for i in order], dtype=np.int64)
    alive = np.arange(1, len(order) + 1)
    base = np.cumsum(rounded // size - np.array(shared, dtype=np.int64))
    of_class = np.zeros((len(order), size + 1), dtype=np.int64)
    of_class[np.arange(len(order)), rounded % size] = 1
    at_least = np.cumsum(of_class[:, ::-1], axis=1)[:, ::-1].cumsum(axis=0)
    rounding_up = at_least[np.arange(len(order)), size - steps % size]
    return int((base + alive * (steps // size) + rounding_up).max())


def _shared_with_longer_lived(
    kv: KVCacheManager, everyone: Sequence[Request], order: Sequence[int], hit: PrefixHit
) -> list[int]:
    """For each request in ``order``: how many of its blocks an earlier one in it holds too.

    Sharing is by prefix, so the walk over a block table ends at its first unshared block.
    """
    taken: set[int] = set()
    counts = []
    for index in order:
        request = everyone[index]
        is_candidate = index == len(everyone) - 1
        blocks = hit.block_ids if is_candidate else request.block_ids
        held_already = 0
        for block in blocks:
            if not is_candidate and kv.num_shared(block) < 2 and block not in hit.block_ids:
                break
            if block in taken:
                held_already += 1
            else:
                taken.add(block)
        counts.append(held_already)
    return counts
