"""How many blocks will be in use at the worst coming moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .kv_cache import KVCacheManager, PrefixHit
from .request import Request

Ints = np.ndarray[Any, np.dtype[np.int64]]


def expected_remaining(request: Request, reserve_fraction: float) -> int:
    """Tokens that ``request`` is expected to generate yet, at least one."""
    total = request.num_prompt_tokens + int(reserve_fraction * request.params.max_tokens)
    return max(1, total - request.num_tokens)


def num_forks_due(request: Request) -> int:
    """How many more sequences ``request`` becomes when its prompt is computed."""
    if request.output_ids or request.sample_index:
        return 0
    return request.params.n - 1


class Forecast:
    """The blocks in use at each coming departure, and what one more request would add to them.

    A request is expected to generate ``reserve_fraction`` of its ``max_tokens``. Exact where that
    comes true and everybody generates a token per step from now on; prompts that are still being
    read come later than that, and preemption is the net for what they add. Blocks that are shared
    count once and go with their last sharer; forks to come count with their own blocks only. Idea:
    lightllm's estimate of the future peak.

    A sequence that holds ``held`` tokens and leaves after ``steps`` more needs ceil((held + t) /
    block_size) blocks in the t-th step from now, ``shared`` of which a longer-lived one holds too.
    """

    def __init__(
        self, kv: KVCacheManager, running: Sequence[Request], reserve_fraction: float
    ) -> None:
        self._kv = kv
        self._reserve_fraction = reserve_fraction
        self._running = list(running)
        self._last_steps: dict[int, int] = {}
        tokens = np.array([r.num_tokens for r in running], dtype=np.int64)
        prompts = np.array([len(r.prompt_ids) for r in running], dtype=np.int64)
        wanted = np.array([r.params.max_tokens for r in running], dtype=np.int64)
        steps = np.maximum(1, prompts + (reserve_fraction * wanted).astype(np.int64) - tokens)
        self._remaining: list[int] = steps.tolist()
        longest_first = np.argsort(-steps, kind="stable")
        shared = np.zeros_like(steps)
        for index in longest_first.tolist():
            shared[index] = self._note_shared(running[index], self._remaining[index])
        table = np.array([tokens - 1, steps, shared])[:, longest_first]
        self._held, self._steps, self._shared = table
        self._departures = self._steps
        self._usage = usage_at_departures(self._held, self._steps, self._shared, kv.block_size)
        for request in running:
            if num_forks_due(request):
                self._usage = self._usage + self._needs_of_forks(request, self._departures)
                self._append_forks(request)

    def peak_with(self, request: Request, hit: PrefixHit) -> int:
        """The most blocks in use at once if ``request`` boards now with what ``hit`` found."""
        _, usage = self._with(request, hit)
        return int(usage.max())

    def add(self, request: Request, hit: PrefixHit) -> None:
        """``request`` boards.

        Blocks that it shares with shorter-lived ones may count twice in what later calls ask: the
        estimate errs on the safe side until it is made anew.
        """
        steps = expected_remaining(request, self._reserve_fraction)
        lasts = self._lasts(hit)
        self._departures, self._usage = self._with(request, hit)
        self._append(request.num_tokens - 1, steps, sum(last >= steps for last in lasts))
        self._append_forks(request)
        self._running.append(request)
        self._remaining.append(steps)
        for block, last in zip(hit.block_ids, lasts, strict=True):
            self._last_steps[block] = max(last, steps)

    def _with(self, request: Request, hit: PrefixHit) -> tuple[Ints, Ints]:
        """Departures with that of ``request``, and usage with its needs."""
        steps, size = expected_remaining(request, self._reserve_fraction), self._kv.block_size
        alive = self._steps >= steps
        at_its_end = -(-(self._held[alive] + steps) // size) - self._shared[alive]
        departures = np.append(self._departures, steps)
        usage = np.append(self._usage, at_its_end.sum())
        needs = -(-(request.num_tokens - 1 + departures) // size)
        if hit.block_ids:
            lasts = np.sort(self._lasts(hit))
            needs -= len(lasts) - np.searchsorted(lasts, departures)
        usage += np.where(departures <= steps, needs, 0)
        return departures, usage + self._needs_of_forks(request, departures)

    def _append(self, held: int, steps: int, shared: int) -> None:
        self._held = np.append(self._held, held)
        self._steps = np.append(self._steps, steps)
        self._shared = np.append(self._shared, shared)

    # ---------------------------------------------------------------- forks to come

    def _needs_of_forks(self, request: Request, departures: Ints) -> Ints:
        """What those who fork from ``request`` need besides the prompt's full blocks."""
        steps, size = expected_remaining(request, self._reserve_fraction), self._kv.block_size
        own = -(-(request.num_tokens - 1 + departures) // size) - request.num_prompt_tokens // size
        return num_forks_due(request) * np.where(departures <= steps, own, 0)

    def _append_forks(self, request: Request) -> None:
        steps, size = expected_remaining(request, self._reserve_fraction), self._kv.block_size
        for _ in range(num_forks_due(request)):
            self._append(request.num_tokens - 1, steps, request.num_prompt_tokens // size)

    # ---------------------------------------------------------------- shared blocks

    def _note_shared(self, request: Request, steps: int) -> int:
        """Enter what ``request`` shares; returns how many blocks longer-lived ones hold too."""
        num_known = 0
        for block in self._kv.shared_prefix(request):
            if block in self._last_steps:
                num_known += 1
            else:
                self._last_steps[block] = steps
        return num_known

    def _lasts(self, hit: PrefixHit) -> list[int]:
        """For each block of ``hit``: the steps until its last holder leaves, 0 where it is free."""
        lasts = []
        for index, block in enumerate(hit.block_ids):
            if block not in self._last_steps and self._kv.num_sharers(block):
                self._note_holder(index, block)
            lasts.append(self._last_steps.get(block, 0))
        return lasts

    def _note_holder(self, index: int, block: int) -> None:
        """Enter the blocks of the one request that has ``block`` at ``index`` of its table."""
        for request, steps in zip(self._running, self._remaining, strict=True):
            table = request.block_ids
            if index < len(table) and table[index] == block:
                self._last_steps |= {b: steps for b in table if b not in self._last_steps}
                return


def usage_at_departures(held: Ints, steps: Ints, shared: Ints, block_size: int) -> Ints:
    """Blocks in use in each sequence's last step; the sequences come longest first.

    Usage only grows until somebody leaves, so its peak is among these. Those alive when i leaves
    are the first i + 1, so

        usage_i = sum_{j <= i} (ceil((held_j + steps_i) / size) - shared_j)

    The sum of ceilings needs no inner loop: with a = (held + size - 1) // size and r the remainder,
    a ceiling is a + steps_i // size + [r + steps_i % size >= size], and the sum of the last term
    over j <= i counts the r of at least size - steps_i % size seen so far.
    """
    rows = np.arange(len(held))
    whole, rest = np.divmod(held + block_size - 1, block_size)
    certain = np.cumsum(whole - shared) + (rows + 1) * (steps // block_size)
    seen_at_least = (rest >= np.arange(block_size + 1)[:, None]).cumsum(axis=1)
    usage: Ints = certain + seen_at_least[block_size - steps % block_size, rows]
    return usage
