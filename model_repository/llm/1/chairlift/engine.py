"""The loop: take in, schedule, run, collect. One thread, and it never waits on Triton.

Everything that leaves the engine goes out as one list of plain tuples per step (``Outputs``), so
that the engine could move to a process of its own. Everything that comes in (submit, abort, drain)
is a command that the loop picks up between two steps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from enum import Enum

from .collect import Collector
from .deadlines import Deadlines, Pace, too_late
from .errors import ErrorCode, RequestError
from .model_runner import Runner, StepResult
from .request import Request
from .scheduler import Scheduler, StepPlan
from .step_ahead import Hooks, StepAhead, StepTimes
from .step_outputs import ErrorOut, Outputs, StepStats
from .step_stats import step_stats

logger = logging.getLogger(__name__)

# Steps that fail in a row before the engine gives up: one bad request must not end it, and a device
# that has died must not turn every request into a timeout.
FAILED_STEPS_LIMIT = 3
IDLE_BEAT_S = 0.25


class State(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"
    UNHEALTHY = "unhealthy"
    STOPPED = "stopped"


class Engine:
    """Drives scheduler and runner; safe to call from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        emit: Callable[[Outputs], None],
        clock: Callable[[], float],
        *,
        max_waiting: int,
        on_step: Callable[[StepStats], None] | None = None,
        one_step_ahead: bool = False,
    ) -> None:
        self.state = State.SERVING
        self.last_beat = clock()
        self._scheduler = scheduler
        self._runner = runner
        self._emit = emit
        self._clock = clock
        self._on_step = on_step
        self._max_waiting = max_waiting
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._collector = Collector(scheduler, runner)
        self._num_incoming = 0
        self._num_waiting = 0
        self._failed_steps = 0
        self._drain_limit: float | None = None
        self._pace = Pace()
        self._deadlines = Deadlines(self._pace, scheduler.kv.num_findable_tokens)
        hooks = Hooks(self._count_waiting, self._finish_step, self._on_failed_step)
        self._ahead = StepAhead(scheduler, runner, clock, hooks) if one_step_ahead else None
        self._thread = threading.Thread(target=self._loop, name="chairlift-engine", daemon=True)

    # ---------------------------------------------------------------- called by other threads

    def start(self) -> None:
        self._thread.start()

    def check_fits(self, request: Request) -> None:
        """Raises ``RequestError``, with the numbers, for a request that the pool can never hold."""
        kv = self._scheduler.kv
        needed = kv.blocks_for(request.max_total_tokens)
        if needed > kv.num_usable:
            raise RequestError(
                f"prompt ({request.num_prompt_tokens} tokens) + max_tokens "
                f"({request.params.max_tokens}) need {needed} KV blocks of {kv.block_size} tokens, "
                f"but the pool has {kv.num_usable}"
            )

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests over, all or none; raises ``RequestError`` where none are taken."""
        with self._wake:
            if self.state is not State.SERVING:
                raise self._refusal()
            self._num_incoming += len(requests)
            self._commands.append(lambda: self._accept(requests))
            self._wake.notify_all()

    def abort(self, group: int, error: RequestError | None = None) -> None:
        """End a request wherever it is; with ``error`` its client is told, once."""
        self._command(lambda: self._abort(group, error))

    def abort_sequence(self, group: int, sample_index: int) -> None:
        """End one of a request's sequences without a word: its text is complete (a stop string)."""
        self._command(lambda: self._abort_sequence(group, sample_index))

    def drain(self, limit_s: float) -> None:
        """Take nothing more, let running requests finish for ``limit_s`` seconds, end the rest."""
        with self._wake:
            if self.state is State.SERVING:
                self.state = State.DRAINING
                self._drain_limit = self._clock() + limit_s
            self._commands.append(self._end_waiting)
            self._wake.notify_all()

    def stop(self) -> None:
        """End every request, end the thread, and wait for it."""
        with self._wake:
            self._commands.append(self._stop)
            self._wake.notify_all()
        self._thread.join()

    def check_room(self) -> None:
        """Raises ``RequestError`` where the waiting room is full: the other way to push back."""
        if self.num_waiting >= self._max_waiting:
            raise RequestError(
                f"the queue is full: {self.num_waiting} requests are waiting, max_waiting is "
                f"{self._max_waiting}",
                ErrorCode.UNAVAILABLE,
            )

    def wait_for_room(self) -> bool:
        """Block while the waiting room is full; False once the engine takes no more requests."""
        with self._wake:
            self._wake.wait_for(
                lambda: self.state is not State.SERVING or self.num_waiting < self._max_waiting
            )
            return self.state is State.SERVING

    def wait_until_idle(self) -> bool:
        """Block until nothing is open; False once the engine takes no more requests."""
        with self._wake:
            self._wake.wait_for(
                lambda: (
                    self.state is not State.SERVING
                    or not (self._collector.groups or self._num_incoming)
                )
            )
            return self.state is State.SERVING

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_blocks_used(self) -> int:
        return self._scheduler.kv.num_used

    @property
    def num_waiting(self) -> int:
        """Requests submitted that have not boarded yet."""
        return self._num_incoming + self._num_waiting

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        try:
            while self.state not in (State.STOPPED, State.UNHEALTHY):
                self._take_commands()
                if not self._step():
                    self._rest()
        except Exception:
            logger.exception("the engine loop failed")
            self._give_up("the engine failed; see the server's log")
        if self._ahead is not None:
            self._ahead.abandon()
        self._take_commands()  # whoever was submitted meanwhile is refused, not forgotten

    def _take_commands(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, []
        for command in commands:
            command()
        if self._drain_limit is not None and self.state is State.DRAINING:
            if self._collector.groups and self._clock() >= self._drain_limit:
                self._end_all(ErrorCode.UNAVAILABLE, "the server is shutting down")
            if not self._collector.groups:
                self._set_state(State.DRAINED)

    def _step(self) -> bool:
        """One step; False where there was nothing to run."""
        started = self.last_beat = self._clock()
        self._end_overdue()
        if self._ahead is not None:
            return self._ahead.step(started)
        plan = self._scheduler.schedule(started)
        self._count_waiting()
        if not plan:
            return False
        scheduled = self._clock()
        try:
            result = self._runner.run(plan)
        except Exception as error:
            self._on_failed_step(plan, error)
            return True
        self._finish_step(plan, result, StepTimes(started, scheduled))
        return True

    def _finish_step(self, plan: StepPlan, result: StepResult, times: StepTimes) -> None:
        self._failed_steps = 0
        seconds, num_decodes = self._clock() - times.scheduled, len(plan.decodes)
        self._pace.observe(seconds, num_decodes, plan.num_tokens - num_decodes)
        self._emit(self._collector.collect(plan, result))
        if self._on_step is not None:
            self._on_step(step_stats(self._scheduler, plan, times, self._clock()))

    def _rest(self) -> None:
        wake_at = self._scheduler.policy.wake_at(self._scheduler.waiting)
        pause = IDLE_BEAT_S if wake_at is None else max(0.0, wake_at - self._clock())
        with self._wake:
            if not self._commands:
                self._wake.wait(min(pause, IDLE_BEAT_S))

    # ---------------------------------------------------------------- commands

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify_all()

    def _accept(self, requests: Sequence[Request]) -> None:
        with self._wake:
            self._num_incoming -= len(requests)
        if self.state is not State.SERVING:
            error = self._refusal()
            self._emit([ErrorOut(r.group, error.code, error.message) for r in requests])
            return
        for request in requests:
            try:
                self._check_deadline(request)
                self._scheduler.add(request)
            except RequestError as error:
                self._emit([ErrorOut(request.group, error.code, error.message)])
            else:
                self._collector.groups[request.group] = [request]
                self._deadlines.watch(request)

    def _check_deadline(self, request: Request) -> None:
        """Raises ``RequestError`` for a request whose deadline can't be met, given the queue."""
        if request.deadline is None:
            return
        queued = self._scheduler.waiting.num_queued_prompt_tokens
        lateness = self._deadlines.lateness(request, self._clock(), queued)
        if lateness:
            raise too_late(lateness)

    def _end_overdue(self) -> None:
        now = self._clock()
        for request in self._deadlines.overdue(now):
            self._abort(request.group, too_late(self._deadlines.lateness(request, now)))

    def _abort(self, group: int, error: RequestError | None) -> None:
        members = self._collector.groups.pop(group, None)
        if members is None:
            return
        for member in members:
            self._collector.drop(member)
        if error is not None:
            self._emit([ErrorOut(group, error.code, error.message)])

    def _abort_sequence(self, group: int, sample_index: int) -> None:
        for member in list(self._collector.groups.get(group, ())):
            if member.sample_index == sample_index:
                self._collector.drop(member)
                self._collector.leave(member)

    def _end_waiting(self) -> None:
        for request in list(self._scheduler.waiting):
            if request.first_scheduled is None:
                self._abort(
                    request.group,
                    RequestError("the server is shutting down", ErrorCode.UNAVAILABLE),
                )

    def _end_all(self, code: ErrorCode, message: str) -> None:
        for group in list(self._collector.groups):
            self._abort(group, RequestError(message, code))

    def _stop(self) -> None:
        self._end_all(ErrorCode.UNAVAILABLE, "the server is shutting down")
        self._set_state(State.STOPPED)

    # ---------------------------------------------------------------- trouble

    def _on_failed_step(self, plan: StepPlan, error: Exception) -> None:
        """End the requests of the step, or retry smaller where memory was the trouble."""
        rows = len(plan.rows)
        if _is_out_of_memory(error) and plan.num_tokens > 1:
            logger.warning("out of memory in a step of %d tokens; retrying", plan.num_tokens)
            self._scheduler.retreat(plan)
            return
        logger.exception("a step of %d rows failed", rows, exc_info=error)
        self._failed_steps += 1
        message = f"the step that computed this request failed: {type(error).__name__}: {error}"
        for request in self._scheduler.fail_step(plan):
            self._abort(request.group, RequestError(message, ErrorCode.INTERNAL))
        if self._failed_steps >= FAILED_STEPS_LIMIT:
            self._give_up(f"{self._failed_steps} steps failed in a row; the engine is unhealthy")

    def _give_up(self, message: str) -> None:
        """Fail what is open and refuse what comes; the supervisor restarts the server."""
        logger.critical("%s", message)
        self._set_state(State.UNHEALTHY)
        groups, self._collector.groups = self._collector.groups, {}
        self._emit([ErrorOut(group, ErrorCode.INTERNAL, message) for group in groups])

    def _refusal(self) -> RequestError:
        message = (
            "the engine is unhealthy"
            if self.state is State.UNHEALTHY
            else "the server is shutting down"
        )
        return RequestError(message, ErrorCode.UNAVAILABLE)

    def _set_state(self, state: State) -> None:
        with self._wake:
            self.state = state
            self._wake.notify_all()

    def _count_waiting(self) -> None:
        """Tell those who wait for room, or for an idle engine, what has changed."""
        with self._wake:
            self._num_waiting = len(self._scheduler.waiting)
            self._wake.notify_all()


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error)
    return type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
