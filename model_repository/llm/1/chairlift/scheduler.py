"""One step's token budget: who runs, for how many tokens, who boards, and who is preempted.

There are no phases. A request has ``num_tokens`` (prompt and output so far), ``num_computed`` of
them in the cache; each step hands out tokens so that the second catches up with the first. Prefill,
chunked prefill, decode, a prefix hit, and resuming after a preemption are one case. The idea is
vLLM's V1 scheduler; the admission rule is in admission.py, the queue in waiting_room.py.

``running`` is sorted by rank. It is served from its head and preempted from its tail, so a row that
is in the plan stays there: nobody has to be taken back out of a step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from .admission import Admission
from .config import EngineConfig
from .kv_cache import NO_HIT, BlockCopy, KVCacheManager, PrefixHit
from .policies import BatchPolicy
from .request import Request, Status
from .step_budget import StepBudget
from .waiting_room import WaitingRoom


class Row(NamedTuple):
    """``num_tokens`` tokens of ``request`` from position ``start`` are computed in this step."""

    request: Request
    start: int
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What one forward computes: rows with one token first, then prompt chunks. No tensors.

    ``copies`` come before everything else. A chunk may build on what another row of the same step
    computes, so a backend writes a layer's keys and values for all rows before it reads any.
    """

    decodes: list[Row] = field(default_factory=list)
    prefills: list[Row] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def rows(self) -> list[Row]:
        return self.decodes + self.prefills

    def __bool__(self) -> bool:
        return self.num_tokens > 0


class Scheduler:
    """Owns the waiting room and the running list; asks the KV manager for memory."""

    def __init__(
        self, config: EngineConfig, kv: KVCacheManager, policy: BatchPolicy, waiting: WaitingRoom
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.waiting = waiting
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = config.max_num_seqs
        self._budget = StepBudget(config, kv.block_size)
        self._admission = Admission(kv, config.kv_reserve_fraction)
        self._known_unfit: set[int] = set()

    # ---------------------------------------------------------------- in and out

    def add(self, request: Request) -> None:
        """Queue ``request``; raises ``RequestError`` where its tenant has too much waiting."""
        self.waiting.add(request)

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def finish(self, request: Request) -> None:
        """Take ``request`` out, wherever it is, and return its blocks at once."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._end(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
            request.status = Status.FINISHED

    def finish_running(self, finished: Collection[int]) -> None:
        """``finish`` for many: one pass over the running list, by ``uid``."""
        leaving = [request for request in self.running if request.uid in finished]
        self.running = [request for request in self.running if request.uid not in finished]
        for request in leaving:
            self._end(request)

    def _end(self, request: Request) -> None:
        self._leave_seat(request)
        self.waiting.left(request)
        request.status = Status.FINISHED

    def fork(self, parent: Request, child: Request) -> None:
        """Start ``child`` from what ``parent`` has computed; without a seat for it, queue it."""
        self.waiting.forked(child)
        if len(self.running) < self._num_seats:
            self.kv.fork(parent, child)
            self._take_seat(child)
        else:
            self.waiting.put_back(child)

    @property
    def _num_seats(self) -> int:
        return min(self._max_num_seqs, self._budget.limit)

    def _take_seat(self, request: Request) -> None:
        request.status = Status.RUNNING
        insort(self.running, request, key=self.waiting.order.rank)
        self._admission.seated(request)

    def _leave_seat(self, request: Request) -> None:
        """Give up the blocks; the caller has taken ``request`` off the running list."""
        self.kv.free(request)
        self._admission.left(request)
        self.blocks_came_free()

    def blocks_came_free(self) -> None:
        """Whoever did not fit may be asked again."""
        self._known_unfit.clear()

    # ---------------------------------------------------------------- trouble

    def fail_step(self, plan: StepPlan) -> list[Request]:
        """The step raised: what it wrote is unfindable, its requests are out. Returns them."""
        for row in plan.rows:
            self.kv.forget(row.request, row.start)
        victims = [row.request for row in plan.rows]
        for request in victims:
            self.finish(request)
        return victims

    def retreat(self, plan: StepPlan) -> None:
        """Take back a step that ran out of memory, and plan smaller ones for a while.

        Whoever read a prompt boards again later, since chunks may count on each other; so does
        whoever was to get a copy, and whoever the smaller budget has no token for.
        """
        self._budget.halve(plan.num_tokens)
        for row in plan.rows:
            self.kv.forget(row.request, row.start)
            row.request.num_computed = row.start
        copied = {copy.target for copy in plan.copies}
        out = {row.request.uid for row in plan.prefills}
        if copied:
            out |= {r.uid for r in self.running if copied.intersection(r.block_ids)}
        staying = [request for request in self.running if request.uid not in out]
        out |= {request.uid for request in staying[self._num_seats :]}
        leaving = [request for request in self.running if request.uid in out]
        self.running = staying[: self._num_seats]
        for request in leaving:
            self._preempt(request, plan)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Recompute later: give the blocks back, keep the tokens. It is off the running list."""
        self._leave_seat(victim)
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.status = Status.WAITING
        self.num_preemptions += 1
        self.waiting.put_back(victim)
        plan.preempted.append(victim)

    # ---------------------------------------------------------------- one step

    def schedule(self, now: float) -> StepPlan:
        """Choose the rows of one step and advance their ``num_computed``."""
        self._budget.start_step()
        self._admission.start_step()
        plan = StepPlan()
        left = self._continue_running(plan)
        if not plan.preempted:
            self._admit(plan, left, now)
        plan.copies = self.kv.take_copies()
        plan.num_tokens = len(plan.decodes) + sum(row.num_tokens for row in plan.prefills)
        if plan.prefills:
            self._known_unfit.clear()  # their new blocks may be somebody's prefix
        return plan

    def _continue_running(self, plan: StepPlan) -> int:
        """A token for everybody who decodes, the rest for prompts; returns what is left over.

        Tokens for all decodes are set aside first, so a chunk never delays one. Nothing is missing
        where a step in flight draws the last token of an answer.
        """
        decodes = plan.decodes
        num_decoding = sum([r.num_tokens - r.num_computed == 1 for r in self.running])
        left = self._budget.limit - num_decoding
        for request in self.running:  # grows shorter at its tail when somebody is preempted
            start = request.num_computed
            missing = request.num_tokens - start
            if missing > 1:
                left = self._continue_prompt(request, plan, left)
            elif missing and (start < request.num_granted or self._make_room(request, 1, plan)):
                decodes.append(Row(request, start, 1))
                request.num_computed = start + 1
        return left

    def _continue_prompt(self, request: Request, plan: StepPlan, left: int) -> int:
        """Read the next chunk; what somebody else has read of the same prompt is taken over."""
        hit = NO_HIT
        if request.num_computed % self.kv.block_size == 0:
            hit = self.kv.find_prefix(request)
        chunk = self._chunk(request, hit, plan, left)
        if chunk == 0 or not self._make_room(request, chunk, plan, hit):
            return 0
        self._read(request, hit, chunk, plan)
        return left - chunk

    def _read(self, request: Request, hit: PrefixHit, chunk: int, plan: StepPlan) -> None:
        cached = len(hit.block_ids) * self.kv.block_size
        if request.num_preemptions == 0 and not request.output_ids:
            request.num_cached += cached
        start = request.num_computed + cached
        plan.prefills.append(Row(request, start, chunk))
        request.num_computed = start + chunk

    def _chunk(self, request: Request, hit: PrefixHit, plan: StepPlan, left: int) -> int:
        start = request.num_computed + len(hit.block_ids) * self.kv.block_size
        return self._budget.chunk(
            start,
            request.num_tokens - start,
            left,
            alone=self.num_unfinished == 1,
            first=not plan.prefills,
        )

    def _make_room(
        self, request: Request, num_tokens: int, plan: StepPlan, hit: PrefixHit = NO_HIT
    ) -> bool:
        """Allocate, preempting the last of the running until it fits; False if it is the last."""
        while not self.kv.allocate(request, num_tokens, hit):
            victim = self.running.pop()
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    # ---------------------------------------------------------------- admission

    def _admit(self, plan: StepPlan, left: int, now: float) -> None:
        """Board candidates in order while there are tokens, seats, and memory."""
        if left <= 0 or len(self.running) >= self._num_seats:
            return
        self.waiting.refresh()
        position = 0
        while left > 0:
            candidate = self.waiting.candidate(position)
            if candidate is None or not self._has_seats(candidate):
                return
            if not self.policy.admits(candidate, len(self.running), self.waiting, now):
                return
            chunk = self._try_to_board(candidate, position, plan, left, now)
            if chunk:
                left -= chunk
            elif candidate.uid in self._known_unfit and self.waiting.set_aside(candidate):
                position += 1
            else:
                return

    def _has_seats(self, candidate: Request) -> bool:
        """Whether ``candidate`` and all who will fork from it find a seat, or it is alone."""
        needed = len(self.running) + self._admission.seats_for(candidate)
        return not self.running or needed <= self._num_seats

    def _try_to_board(
        self, candidate: Request, position: int, plan: StepPlan, left: int, now: float
    ) -> int:
        """The tokens read for ``candidate`` in this step; 0 if it stays."""
        if candidate.uid in self._known_unfit:
            return 0
        hit = self.kv.find_prefix(candidate)
        chunk = self._chunk(candidate, hit, plan, left)
        if chunk == 0:
            return 0
        fits = self._admission.will_fit(self.running, candidate, hit)
        if not (fits and self.kv.allocate(candidate, chunk, hit)):
            self._known_unfit.add(candidate.uid)
            return 0
        self._admission.boarded(candidate, hit)
        self._take_seat(candidate)
        self._read(candidate, hit, chunk, plan)
        self.waiting.board(candidate, position, now)
        return chunk
