"""The engine's loop around scheduler and KV manager, with a fake device that checks every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from chairlift.config import EngineConfig
from chairlift.forecast import num_forks_due
from chairlift.kv_cache import KVCacheManager
from chairlift.policies import Static, make_batch_policy
from chairlift.request import Request, SamplingParams, Status
from chairlift.scheduler import Scheduler, StepPlan
from chairlift.waiting_room import make_waiting_room
from tests.unit.fake_cache import FakeCache

Trouble = Literal["none", "error", "out of memory"]
UID_STRIDE = 16


@dataclass
class History:
    """What a test wants to know about a sequence besides what the request itself says."""

    stops_after: int
    reached: int = 0
    adopted: int = 0
    computed: int = 0


@dataclass
class Simulation:
    """Steps a scheduler as the engine does; ``now`` counts steps. Every step is checked."""

    num_blocks: int = 32
    block_size: int = 16
    settings: dict[str, Any] = field(default_factory=dict)
    alphabet: int = 1000

    def __post_init__(self) -> None:
        self.config = EngineConfig.model_validate(self.settings)
        self.kv = KVCacheManager(
            self.num_blocks + 1, self.block_size, prefix_caching=self.config.enable_prefix_caching
        )
        self.policy = make_batch_policy(self.config)
        self.waiting = make_waiting_room(self.config, self.kv)
        self.scheduler = Scheduler(self.config, self.kv, self.policy, self.waiting)
        self.cache = FakeCache(self.num_blocks + 1, self.block_size)
        self.now = 0.0
        self.live: dict[int, Request] = {}
        self.done: dict[int, Request] = {}
        self.history: dict[int, History] = {}
        self.num_steps = 0
        self.num_computed_tokens = 0
        self._next_uid = 0

    # ---------------------------------------------------------------- requests

    def arrive(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        stops_after: int | None = None,
        n: int = 1,
        prompt_logprobs: int | None = None,
        **fields: Any,
    ) -> Request:
        """A request whose sequences end by themselves after ``stops_after`` tokens."""
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs)
        uid = self._next_uid
        self._next_uid += UID_STRIDE
        request = Request(uid, list(prompt), params, seed=uid, arrival=self.now, **fields)
        assert self.kv.blocks_for(request.max_total_tokens) <= self.kv.num_usable
        self.scheduler.add(request)
        self._enter(request, stops_after or max_tokens)
        return request

    def _enter(self, request: Request, stops_after: int) -> None:
        self.live[request.uid] = request
        self.history[request.uid] = History(stops_after)

    def cancel(self, request: Request) -> None:
        self.scheduler.finish(request)
        self._end(request)
        self.check_books()

    def _end(self, request: Request) -> None:
        assert request.status is Status.FINISHED
        assert not request.block_ids
        self.done[request.uid] = self.live.pop(request.uid)

    # ---------------------------------------------------------------- one step

    def step(self, trouble: Trouble = "none") -> StepPlan:
        self.now += 1.0
        self.num_steps += 1
        before = list(self.scheduler.running)
        decoding = {r.uid for r in before if r.num_tokens - r.num_computed == 1}
        plan = self.scheduler.schedule(self.now)
        self._check_plan(plan, before, decoding)
        if trouble == "none" or not plan:
            self._run(plan)
        elif trouble == "error":
            self.cache.spoil(plan.rows)
            for victim in self.scheduler.fail_step(plan):
                self._end(victim)
        else:
            self.cache.spoil(plan.rows)
            self.scheduler.retreat(plan)
            for row in plan.rows:
                self.history[row.request.uid].reached = row.request.num_computed
        self.check_books()
        return plan

    def run(self, limit: int = 5_000) -> None:
        """Step until everybody has finished; whoever hasn't by then is starved."""
        for _ in range(limit):
            if not self.live:
                assert self.kv.num_used == 0
                return
            self.step()
        raise AssertionError(f"starved after {limit} steps: {sorted(self.live)}")

    def _run(self, plan: StepPlan) -> None:
        self.cache.copy(plan.copies)
        self.cache.write(plan.rows)
        for request, start, num_tokens in plan.rows:
            index, offset = divmod(start, self.block_size)
            if 0 < offset < offset + num_tokens < self.block_size:
                sharers = self.kv.num_sharers(request.block_ids[index])
                assert sharers == 1, "writes to an unfinished block that others hold"
        for request in self.scheduler.running:
            self.cache.check(request)
        self.num_computed_tokens += plan.num_tokens
        finished: set[int] = set()
        for row in plan.rows:
            if row.request.num_computed == row.request.num_tokens:
                self._sample(row.request, finished)
        self.scheduler.finish_running(finished)
        for uid in finished & self.live.keys():
            self._end(self.live[uid])

    def _sample(self, request: Request, finished: set[int]) -> None:
        forks = num_forks_due(request)
        self._append(request, finished)
        for index in range(1, forks + 1):
            child = Request(
                request.uid + index,
                request.prompt_ids,
                request.params,
                request.seed,
                request.arrival,
                sample_index=index,
                group=request.group,
                priority=request.priority,
                tenant=request.tenant,
                cache_salt=request.cache_salt,
                batch_id=request.batch_id,
            )
            child.first_scheduled, child.num_cached = request.first_scheduled, request.num_cached
            stops_after = self.history[request.uid].stops_after + index
            self._enter(child, min(stops_after, request.params.max_tokens))
            self.history[child.uid].adopted = child.num_cached
            self._append(child, finished)
            if child.uid in finished:
                child.status = Status.FINISHED
            else:
                self.scheduler.fork(request, child)
                self.history[child.uid].reached = child.num_computed

    def _append(self, request: Request, finished: set[int]) -> None:
        """The token is a function of seed, sample, and position alone, as in the sampler."""
        where = (request.seed, request.sample_index, request.num_tokens)
        request.append_output(random.Random(repr(where)).randrange(self.alphabet))
        if len(request.output_ids) >= self.history[request.uid].stops_after:
            finished.add(request.uid)

    # ---------------------------------------------------------------- what must hold

    def _check_plan(self, plan: StepPlan, before: list[Request], decoding: set[int]) -> None:
        rows = plan.rows
        uids = [row.request.uid for row in rows]
        preempted = {request.uid for request in plan.preempted}
        assert len(set(uids)) == len(uids), "a request has two rows in one step"
        assert plan.num_tokens == sum(row.num_tokens for row in rows)
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.config.max_num_seqs
        assert all(row.num_tokens == 1 for row in plan.decodes)
        assert decoding <= set(uids) | preempted, "somebody who decodes got no token"
        if preempted:
            assert set(uids) <= {request.uid for request in before}, "boarded while preempting"
            assert not preempted & set(uids)
            rank = self.waiting.order.rank
            worst_running = max(map(rank, self.scheduler.running), default=())
            assert worst_running < min(map(rank, plan.preempted)), "the wrong one was preempted"
        for request in plan.preempted:
            self.history[request.uid].reached = 0
        for row in rows:
            self._check_row(row.request, row.start, row.num_tokens)
        if not rows:
            self._check_idle()

    def _check_row(self, request: Request, start: int, num_tokens: int) -> None:
        """Nothing is computed twice; what is skipped was found in the cache, in whole blocks."""
        history = self.history[request.uid]
        skipped = start - history.reached
        assert request.status is Status.RUNNING and num_tokens >= 1
        assert skipped >= 0 and (skipped == 0 or skipped % self.block_size == 0)
        assert skipped == 0 or history.reached % self.block_size == 0
        assert request.num_computed == start + num_tokens <= request.num_tokens
        if request.params.prompt_logprobs is not None or not self.config.enable_prefix_caching:
            assert skipped == 0, "cached tokens have no logits"
        if request.num_preemptions == 0 and not request.output_ids:
            history.adopted += skipped
        assert request.num_cached == history.adopted
        history.computed += num_tokens
        history.reached = request.num_computed

    def _check_idle(self) -> None:
        """A step without rows: nobody is there, or a static batch is still filling."""
        waiting = self.scheduler.waiting
        assert not self.scheduler.running
        if len(waiting):
            assert isinstance(self.policy, Static)
            assert len(waiting) < self.policy.batch_size
            wake_at = self.policy.wake_at(waiting)
            assert wake_at is not None and wake_at > self.now

    def check_books(self) -> None:
        """Integrity, and nobody lost or in two places."""
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        assert sorted(r.uid for r in everyone) == sorted(self.live)
        assert len(self.scheduler.waiting) == len(list(self.scheduler.waiting))
        assert all(r.status is Status.RUNNING for r in self.scheduler.running)
        for request in self.scheduler.waiting:
            assert request.status is Status.WAITING and not request.block_ids
            assert request.num_overtaken <= self.config.max_overtakes
        worst_case = sum(self.kv.blocks_for(r.max_total_tokens) for r in self.scheduler.running)
        assert self.scheduler._admission._worst_case_blocks == worst_case
        self.kv.check_integrity(everyone)
