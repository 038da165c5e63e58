"""One step's token budget: who runs, for how many tokens, who boards, and who is preempted.

There are no phases. A request has ``num_tokens`` (prompt and output so far) and ``num_computed`` of
them in the cache; each step hands out tokens so that the second catches up with the first. Prefill,
chunked prefill, decode, a prefix hit, and resuming after a preemption are the same case. The idea is
vLLM's V1 scheduler; the admission rule is in admission.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .admission import future_peak_blocks
from .config import EngineConfig
from .kv_cache import BlockCopy, KVCacheManager
from .policies import BatchPolicy, QueueOrder
from .request import Request, Status


class Row(NamedTuple):
    """``num_tokens`` tokens of ``request`` from position ``start`` are computed in this step."""

    request: Request
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What one forward computes: rows with one token first, then prompt chunks. No tensors."""

    decodes: list[Row] = field(default_factory=list)
    prefills: list[Row] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def rows(self) -> list[Row]:
        return self.decodes + self.prefills

    def __bool__(self) -> bool:
        return self.num_tokens > 0


class Scheduler:
    """Owns the waiting queue and the running list; asks the KV manager for memory."""

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, policy: BatchPolicy, waiting: QueueOrder
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.waiting = waiting
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs
        self._token_budget = config.max_num_batched_tokens
        self._prefill_cap = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._whole_prompts = not config.enable_chunked_prefill
        self._reserve_fraction = config.kv_reserve_fraction
        self._pending_copies: list[BlockCopy] = []
        self._blocked_head: tuple[Request, int] | None = None
        self._departures = 0

    # ---------------------------------------------------------------- in and out

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def finish(self, request: Request) -> None:
        """Take ``request`` out, wherever it is, and return its blocks at once."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            return
        self._release(request)

    def finish_running(self, finished: set[int]) -> None:
        """``finish`` for many: one pass over the running list, by ``uid``."""
        leaving = [request for request in self.running if request.uid in finished]
        self.running = [request for request in self.running if request.uid not in finished]
        for request in leaving:
            self._release(request)

    def _release(self, request: Request) -> None:
        request.status = Status.FINISHED
        self.kv.free(request)
        self._departures += 1

    def fork(self, parent: Request, child: Request) -> None:
        """Start ``child`` from the tokens computed for ``parent``; without room for it, queue it."""
        if len(self.running) < self._max_num_seqs:
            copy = self.kv.fork(parent, child)
            if copy:
                if isinstance(copy, BlockCopy):
                    self._pending_copies.append(copy)
                child.status = Status.RUNNING
                self.running.append(child)
                return
        self.waiting.push_front(child)

    def fail_step(self, plan: StepPlan) -> list[Request]:
        """The step raised: what it wrote is unfindable, its requests are out. Returns them."""
        victims = [row.request for row in plan.rows]
        for row in plan.rows:
            self.kv.forget(row.request, row.start)
        for request in victims:
            self.finish(request)
        return victims

    def retreat(self, plan: StepPlan) -> None:
        """Take back a step that ran out of memory; its newest half recomputes later.

        Whoever boarded in it goes too: they may count on blocks that were to be written in it.
        """
        for row in plan.rows:
            self.kv.forget(row.request, row.start)
            row.request.num_computed = row.start
        self._pending_copies = plan.copies + self._pending_copies
        rows = [row.request for row in plan.rows]
        newest = sorted(rows, key=lambda r: (r.arrival, r.uid))[len(rows) // 2 :]
        for request in dict.fromkeys(plan.admitted + newest):
            self._preempt(request, plan)

    # ---------------------------------------------------------------- one step

    def schedule(self, now: float) -> StepPlan:
        """Choose the rows of one step and advance their ``num_computed``."""
        plan = StepPlan()
        budget = self._schedule_decodes(plan)
        budget = self._schedule_chunks(plan, budget)
        if not plan.preempted:
            self._admit(plan, budget, now)
        plan.num_tokens = len(plan.decodes)
        for row in plan.decodes:
            row.request.num_computed += 1
        for row in plan.prefills:
            row.request.num_computed += row.num_tokens
            plan.num_tokens += row.num_tokens
        if plan:
            plan.copies, self._pending_copies = self._pending_copies, []
        return plan

    def _schedule_decodes(self, plan: StepPlan) -> int:
        """One token for everybody whose cache is complete but for the newest token."""
        kv, size = self.kv, self.kv.block_size
        decodes = plan.decodes
        for request in list(self.running):
            start = request.num_computed
            if request.num_tokens - start != 1 or request.status is not Status.RUNNING:
                continue
            # A new block is due, or one has become full, at one position in ``size`` only.
            if start % size in (0, size - 1) and not self._make_room(request, 1, plan):
                continue
            decodes.append(Row(request, start, 1))
        return self._token_budget - len(decodes)

    def _schedule_chunks(self, plan: StepPlan, budget: int) -> int:
        """Prompt chunks of running requests, oldest first, within what the decodes left over."""
        for request in list(self.running):
            missing = request.num_tokens - request.num_computed
            if missing <= 1 or request.status is not Status.RUNNING:
                continue
            chunk = self._chunk(missing, budget)
            if chunk and self._make_room(request, chunk, plan):
                plan.prefills.append(Row(request, request.num_computed, chunk))
                budget -= chunk
        return budget

    def _chunk(self, missing: int, budget: int) -> int:
        """How much of a prompt may be read now; a prompt alone in the engine knows no cap."""
        alone = len(self.running) + len(self.waiting) <= 1
        chunk = min(missing, budget if alone else min(budget, self._prefill_cap))
        if self._whole_prompts and chunk < missing:
            return 0
        return chunk

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        """Allocate, preempting the least important until it fits; False if that was ``request``."""
        while not self.kv.allocate(request, num_tokens):
            victim = max(self.running, key=lambda r: (r.priority, r.arrival, r.uid))
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Recompute later: give the blocks back, keep the tokens, go to the front of the queue."""
        for rows in (plan.decodes, plan.prefills):
            for row in rows:
                if row.request is victim:
                    rows.remove(row)
                    break
        self.kv.forget(victim, victim.num_computed)
        self.kv.free(victim)
        self.running.remove(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.status = Status.WAITING
        self.num_preemptions += 1
        self._departures += 1
        self.waiting.push_front(victim)
        plan.preempted.append(victim)

    # ---------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan, budget: int, now: float) -> None:
        while budget > 0 and len(self.running) < self._max_num_seqs:
            head = self.waiting.peek()
            if head is None or self._blocked_head == (head, self._departures):
                return
            if not self.policy.admits(head, len(self.running), self.waiting, now):
                return
            hit = self.kv.find_prefix(head)
            cached = len(hit.block_ids) * self.kv.block_size
            chunk = self._chunk(head.num_tokens - cached, budget)
            if not chunk:
                return
            peak = future_peak_blocks(self.kv, self.running, head, hit, self._reserve_fraction)
            if (self.running and peak > self.kv.num_usable) or not self.kv.allocate(
                head, chunk, hit
            ):
                self._blocked_head = (head, self._departures)
                return
            self.waiting.pop()
            self._board(head, cached, now)
            plan.prefills.append(Row(head, cached, chunk))
            plan.admitted.append(head)
            budget -= chunk

    def _board(self, request: Request, cached: int, now: float) -> None:
        request.status = Status.RUNNING
        request.num_computed = cached
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached = cached
        self.running.append(request)
