"""Memory-based admission: will everybody still fit when the batch is at its largest?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .kv_cache import KVCacheManager, PrefixHit
from .request import Request


class Future(NamedTuple):
    """What one sequence is expected to do.

    It holds ``held`` tokens when its next one comes, leaves after ``steps`` more, and ``shared`` of
    its blocks are held by longer-lived ones as well.
    """

    held: int
    steps: int
    shared: int


def future_peak_blocks(
    kv: KVCacheManager,
    running: Sequence[Request],
    candidate: Request,
    hit: PrefixHit,
    reserve_fraction: float,
) -> int:
    """The largest number of blocks in use at once if ``candidate`` joins ``running``.

    A request is expected to generate ``reserve_fraction`` of its ``max_tokens``. Exact where that
    comes true and everybody generates a token per step from now on; prompts that are still being
    read come later than that, and preemption is the net for what they add. Idea: lightllm's
    estimate of the future peak, here in blocks and with shared ones counted once.
    """
    everyone = [*running, candidate]
    steps = [expected_remaining(request, reserve_fraction) for request in everyone]
    longest_first = sorted(range(len(everyone)), key=steps.__getitem__, reverse=True)
    futures: list[Future] = []
    taken: set[int] = set()
    for index in longest_first:
        request = everyone[index]
        tables = hit.block_ids if request is candidate else _full_shared_blocks(kv, request, hit)
        shared = _count_taken(tables, taken)
        held = request.num_tokens - 1
        futures.append(Future(held, steps[index], shared))
        prompt_blocks = request.num_prompt_tokens // kv.block_size
        futures += [Future(held, steps[index], prompt_blocks)] * num_forks_due(request)
    return peak_blocks(futures, kv.block_size)


def expected_remaining(request: Request, reserve_fraction: float) -> int:
    """Tokens that ``request`` is expected to generate yet, at least one."""
    total = request.num_prompt_tokens + int(reserve_fraction * request.params.max_tokens)
    return max(1, total - request.num_tokens)


def num_forks_due(request: Request) -> int:
    """How many more sequences ``request`` becomes when its prompt is computed."""
    if request.output_ids or request.sample_index:
        return 0
    return request.params.n - 1


def peak_blocks(futures: Sequence[Future], block_size: int) -> int:
    """The most blocks that ``futures``, sorted so that the longest comes first, use at once.

    Usage is largest just before somebody leaves. Those alive in the step in which i leaves, its
    steps_i-th from now, are the first i + 1, so

        peak = max_i sum_{j <= i} (ceil((held_j + steps_i) / size) - shared_j)

    The sum of ceilings needs no inner loop: with a = (held + size - 1) // size and r the remainder,
    a ceiling is a + steps_i // size + [r + steps_i % size >= size], and the sum of the last term
    over j <= i counts the r of at least size - steps_i % size seen so far.
    """
    held, steps, shared = np.array(futures, dtype=np.int64).T
    rows = np.arange(len(futures))
    rounded = held + block_size - 1
    certain = np.cumsum(rounded // block_size - shared) + (rows + 1) * (steps // block_size)
    seen = np.zeros((len(futures), block_size + 1), dtype=np.int32)
    seen[rows, rounded % block_size] = 1
    at_least = seen[:, ::-1].cumsum(axis=1)[:, ::-1].cumsum(axis=0)
    return int((certain + at_least[rows, block_size - steps % block_size]).max())


def _full_shared_blocks(kv: KVCacheManager, request: Request, hit: PrefixHit) -> list[int]:
    """The leading full blocks of ``request`` that others, or the candidate's ``hit``, hold too."""
    shared = []
    for block in request.block_ids[: request.num_computed // kv.block_size]:
        if kv.num_sharers(block) < 2 and block not in hit.block_ids:
            break
        shared.append(block)
    return shared


def _count_taken(blocks: Sequence[int], taken: set[int]) -> int:
    """How many leading ``blocks`` a longer-lived request has taken; takes the rest."""
    for index, block in enumerate(blocks):
        if block not in taken:
            taken.update(blocks[index:])
            return index
    return len(blocks)
