"""One step ahead: step N+1 is planned and launched while step N runs.

The host waits for step N's tokens only when step N+1 is on its way, so that planning, tensors,
detokenising, and sending cost the device nothing. Until then the token that step N draws for a
request is *promised*: ``num_tokens`` counts it, ``token_ids`` does not hold it, and the runner
takes it from what step N drew on the device.

A request whose answer is complete with step N is not planned again. One that turns out to have
ended (an end token, a stop string, an abort, invalid logits) costs a row of step N+1, whose result
is dropped, and its blocks are free when that step is done (``InFlightKVCache``).

What needs step N's tokens on the host is never planned ahead; step N is collected first, and the
next plan is made as without a step ahead:

* somebody who runs has penalties, bad words, ``min_tokens`` still to come, log-probabilities of any
  kind, or ``n > 1``;
* the running requests might not all find their blocks, so that somebody would be preempted;
* step N could not be launched.

A step that fails takes with it the step that was planned on it: both end as one failed step, whose
rows begin where the earlier of the two did. The same holds for running out of memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from .kv_in_flight import InFlightKVCache
from .model_runner import PendingResult, Runner, StepResult
from .request import Request, Status
from .scheduler import Row, Scheduler, StepPlan

logger = logging.getLogger(__name__)


class StepTimes(NamedTuple):
    """When a step's planning began and ended; never before the step before it was collected."""

    started: float
    scheduled: float


class Flight(NamedTuple):
    """A step that was launched and not collected yet."""

    plan: StepPlan
    pending: PendingResult
    times: StepTimes


class Hooks(NamedTuple):
    """What the engine does with a plan, with a step's result, and with one that failed."""

    planned: Callable[[], None]
    finished: Callable[[StepPlan, StepResult, StepTimes], None]
    failed: Callable[[StepPlan, Exception], None]


class NotLaunched(NamedTuple):
    """Stands for a step that could not be launched; that is told when it is waited for."""

    error: Exception

    def wait(self) -> StepResult:
        raise self.error


class StepAhead:
    """Drives scheduler and runner with at most one step in flight between two calls of ``step``."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float], hooks: Hooks
    ) -> None:
        assert isinstance(scheduler.kv, InFlightKVCache)
        self._kv = scheduler.kv
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._hooks = hooks
        self._flight: Flight | None = None
        self._promised: list[Request] = []
        self._last_finished = clock()

    def step(self, started: float) -> bool:
        """Launch a step, then collect the one before it; False where there was nothing to run."""
        before = self._flight
        if before is not None:
            self._promise(before.plan)
            if self._must_wait(before):
                self._flight = None
                if not self._collect(before, None):
                    return True
                before = None
        plan = self._scheduler.schedule(started)
        self._hooks.planned()
        assert before is None or not plan.preempted, "preempted while a step was in flight"
        self._flight = self._launch(plan, started) if plan else None
        if before is not None:
            self._collect(before, self._flight)
        elif self._flight is not None:
            self._kv.launched(row.request for row in plan.rows)
        return bool(plan) or before is not None

    def abandon(self) -> None:
        """The engine stops: wait for what is in flight, and forget it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with suppress(Exception):
                flight.pending.wait()
        self._kv.done()

    def _launch(self, plan: StepPlan, started: float) -> Flight:
        times = StepTimes(started, self._clock())
        try:
            return Flight(plan, self._runner.launch(plan), times)
        except Exception as error:
            return Flight(plan, NotLaunched(error), times)

    # ---------------------------------------------------------------- may the next one be planned?

    def _promise(self, plan: StepPlan) -> None:
        """Count the tokens that ``plan`` draws, except those that complete an answer."""
        for request, start, num_tokens in plan.rows:
            if (
                request.status is Status.RUNNING
                and start + num_tokens == request.num_tokens
                and len(request.output_ids) + 1 < request.params.max_tokens
            ):
                request.num_tokens += 1
                self._promised.append(request)

    def _take_back_promises(self) -> list[Request]:
        promised, self._promised = self._promised, []
        for request in promised:
            request.num_tokens -= 1
        return promised

    def _must_wait(self, before: Flight) -> bool:
        if isinstance(before.pending, NotLaunched):
            return True
        kv, needed = self._kv, 0
        for request in self._scheduler.running:
            if needs_history(request):
                return True
            if request.num_computed >= request.num_granted:
                needed += max(0, kv.blocks_for(request.num_tokens) - len(request.block_ids))
        return needed > kv.num_free

    # ---------------------------------------------------------------- collecting

    def _collect(self, flight: Flight, later: Flight | None) -> bool:
        """Take in what ``flight`` drew; False where it failed, and ``later`` with it."""
        try:
            result = flight.pending.wait()
        except Exception as error:
            self._undo(flight, later, error)
            return False
        promised = self._take_back_promises()
        self._free(self._kv.done())
        if later is not None:
            self._kv.launched(row.request for row in later.plan.rows)
        times = StepTimes(*(max(moment, self._last_finished) for moment in flight.times))
        self._hooks.finished(flight.plan, result, times)
        self._last_finished = self._clock()
        for request in promised:
            if request.status is Status.RUNNING:
                self._kv.announce(request)
        return True

    def _free(self, freed: bool) -> None:
        if freed:
            self._scheduler.blocks_came_free()

    def _undo(self, flight: Flight, later: Flight | None, error: Exception) -> None:
        self._take_back_promises()
        plan = flight.plan
        if later is not None:
            self._flight = None
            with suppress(Exception):  # what it computed is worthless, but it must have ended
                later.pending.wait()
            plan = merged(plan, later.plan)
        self._free(self._kv.failed())
        self._hooks.failed(plan, error)
        self._last_finished = self._clock()


def needs_history(request: Request) -> bool:
    """Whether the next draw for ``request``, or its report, needs its last token on the host."""
    params = request.params
    return (
        params.n > 1
        or params.logprobs is not None
        or params.prompt_logprobs is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or bool(request.bad_word_ids)
        or len(request.output_ids) < params.min_tokens
    )


def merged(first: StepPlan, second: StepPlan) -> StepPlan:
    """Two steps as one for taking back: each request once, from where it began."""
    prompts = {row.request.uid for row in first.prefills + second.prefills}
    rows: dict[int, Row] = {}
    for row in first.rows + second.rows:
        rows.setdefault(row.request.uid, row)
    return StepPlan(
        decodes=[row for uid, row in rows.items() if uid not in prompts],
        prefills=[row for uid, row in rows.items() if uid in prompts],
        copies=first.copies + second.copies,
        preempted=list(first.preempted),
        num_tokens=first.num_tokens,
    )
