"""The engine's loop over a runner that computes nothing: faults, drain, deadlines, push-back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from chairlift.config import EngineConfig
from chairlift.engine import Engine, State
from chairlift.errors import ErrorCode, RequestError
from chairlift.kv_cache import KVCacheManager
from chairlift.model_runner import Sample, StepResult
from chairlift.policies import make_batch_policy
from chairlift.request import FinishReason, Request, SamplingParams
from chairlift.scheduler import Scheduler, StepPlan
from chairlift.step_outputs import ErrorOut, Outputs, TokenOut
from chairlift.waiting_room import make_waiting_room

UIDS = count()


class OutOfMemoryError(RuntimeError):
    pass


class FakeRunner:
    """Draws token 7 for whoever has caught up; raises what it is told to."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.faults: list[Exception] = []
        self.released: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.world.now += 0.1 + 0.001 * plan.num_tokens
        if self.faults:
            raise self.faults.pop(0)
        samples = [
            Sample(row.request, row.request.sample_index, 7, None, False)
            for row in plan.rows
            if row.start + row.num_tokens == row.request.num_tokens
        ]
        return StepResult(samples, [])

    def release(self, request: Request) -> None:
        self.released.append(request.uid)


class World:
    """An engine driven step by step in the test's own thread."""

    def __init__(self, **settings: object) -> None:
        self.now = 0.0
        self.out: Outputs = []
        config = EngineConfig.model_validate(
            {"max_num_seqs": 8, "batching": "continuous"} | settings
        )
        kv = KVCacheManager(65, 16)
        self.scheduler = Scheduler(
            config, kv, make_batch_policy(config), make_waiting_room(config, kv)
        )
        self.runner = FakeRunner(self)
        self.engine = Engine(
            self.scheduler, self.runner, self.out.extend, lambda: self.now, max_waiting=4
        )

    def submit(self, prompt: int = 20, max_tokens: int = 5, **fields: object) -> int:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = Request(next(UIDS), [1] * prompt, params, seed=0, arrival=self.now, **fields)  # type: ignore[arg-type]
        self.engine.check_fits(request)
        self.engine.submit([request])
        return request.group

    def step(self) -> bool:
        self.engine._take_commands()
        return self.engine._step()

    def run(self) -> None:
        while self.step():
            pass

    def tokens(self, group: int) -> int:
        return sum(isinstance(o, TokenOut) and o.group == group for o in self.out)

    def errors(self, group: int) -> list[ErrorOut]:
        return [o for o in self.out if isinstance(o, ErrorOut) and o.group == group]

    def check_empty(self) -> None:
        assert self.scheduler.kv.num_used == 0
        assert not self.engine._collector.groups
        self.scheduler.kv.check_integrity([])


@pytest.fixture
def world() -> World:
    return World()


def test_requests_finish_with_length_and_give_everything_back(world: World) -> None:
    groups = [world.submit(max_tokens=n) for n in (1, 3, 5)]
    world.run()
    assert [world.tokens(g) for g in groups] == [1, 3, 5]
    lasts = [o for o in world.out if isinstance(o, TokenOut) and o.finish]
    assert [o.finish for o in lasts] == [FinishReason.LENGTH] * 3
    assert sorted(world.runner.released) == sorted(groups)
    world.check_empty()


def test_a_failed_step_ends_its_requests_once_and_the_next_ones_run(world: World) -> None:
    first = world.submit()
    world.runner.faults = [RuntimeError("boom")]
    world.step()
    second = world.submit()
    world.run()
    assert [e.code for e in world.errors(first)] == [ErrorCode.INTERNAL]
    assert "boom" in world.errors(first)[0].message
    assert world.tokens(second) == 5 and world.engine.state is State.SERVING
    world.check_empty()


def test_out_of_memory_is_retried_smaller_and_costs_nobody(world: World) -> None:
    groups = [world.submit() for _ in range(4)]
    world.runner.faults = [OutOfMemoryError("no memory")] * 2
    world.run()
    assert [world.tokens(g) for g in groups] == [5] * 4
    world.check_empty()


def test_three_failures_in_a_row_make_it_unhealthy_and_fail_everybody(world: World) -> None:
    running = [world.submit() for _ in range(3)]
    world.runner.faults = [RuntimeError("boom")] * 3
    for _ in range(3):
        world.submit()
        world.step()
    assert world.engine.state is State.UNHEALTHY
    everyone = {o.group for o in world.out if isinstance(o, ErrorOut)}
    assert everyone >= set(running)
    with pytest.raises(RequestError, match="unhealthy"):
        world.submit()


def test_too_big_for_the_pool_is_refused_with_the_numbers(world: World) -> None:
    with pytest.raises(RequestError, match=r"need 66 KV blocks .* the pool has 64"):
        world.submit(prompt=1000, max_tokens=56)
    fits = world.submit(prompt=1000, max_tokens=24)
    world.run()
    assert world.tokens(fits) == 24


def test_drain_lets_running_finish_and_ends_the_rest(world: World) -> None:
    short, long = world.submit(max_tokens=3), world.submit(max_tokens=60)
    world.step()
    late = world.submit()
    world.engine.drain(1.0)
    with pytest.raises(RequestError, match="shutting down"):
        world.submit()
    while world.engine.state is State.DRAINING:
        world.step()
    assert world.engine.state is State.DRAINED
    assert world.tokens(short) == 3
    assert [e.code for e in world.errors(long)] == [ErrorCode.UNAVAILABLE]
    assert [e.code for e in world.errors(late)] == [ErrorCode.UNAVAILABLE]
    world.check_empty()


def test_abort_while_waiting_running_and_gone(world: World) -> None:
    first = world.submit(max_tokens=50)
    world.step()
    waiting = world.submit()
    for group in (first, waiting, 10**6):
        world.engine.abort(group, RequestError("Request was cancelled", ErrorCode.CANCELLED))
    world.run()
    for group in (first, waiting):
        assert [e.code for e in world.errors(group)] == [ErrorCode.CANCELLED]
    world.check_empty()


def test_deadline_that_cannot_be_met_is_told_early(world: World) -> None:
    """After a step the pace is known: 200 tokens in half a second can't be."""
    world.submit(max_tokens=4)
    world.run()
    hopeless = world.submit(max_tokens=200, deadline=world.now + 0.5)
    easy = world.submit(max_tokens=4, deadline=world.now + 60.0)
    began = world.now
    world.run()
    assert "deadline" in world.errors(hopeless)[0].message
    assert world.tokens(hopeless) == 0 and world.tokens(easy) == 4
    assert world.now - began < 2.0
    world.check_empty()


def test_deadline_lost_while_running_ends_the_request(world: World) -> None:
    world.submit(max_tokens=4)
    world.run()
    group = world.submit(max_tokens=20, deadline=world.now + 2.5)
    world.step()
    world.now += 2.0
    world.run()
    assert "deadline" in world.errors(group)[0].message
    assert 0 < world.tokens(group) < 20
    world.check_empty()


@pytest.fixture
def threaded(world: World) -> Iterator[World]:
    world.engine.start()
    yield world
    world.engine.stop()


def test_waiting_for_room_wakes_on_drain(world: World) -> None:
    """``execute`` must not stay blocked when the server goes."""
    for _ in range(4):
        world.submit()
    woke: list[bool] = []
    waiter = threading.Thread(target=lambda: woke.append(world.engine.wait_for_room()))
    waiter.start()
    world.engine.drain(0.0)
    waiter.join(10)
    assert woke == [False]


def test_waiting_for_room_wakes_when_somebody_boards(world: World) -> None:
    for _ in range(4):
        world.submit()
    woke: list[bool] = []
    waiter = threading.Thread(target=lambda: woke.append(world.engine.wait_for_room()))
    waiter.start()
    world.step()
    waiter.join(10)
    assert woke == [True]


def test_the_thread_serves_and_stops(threaded: World) -> None:
    groups = [threaded.submit(max_tokens=10) for _ in range(3)]
    assert threaded.engine.wait_until_idle()
    assert [threaded.tokens(g) for g in groups] == [10] * 3
    threaded.check_empty()


def test_a_full_room_refuses_where_the_engine_holds_the_queue(world: World) -> None:
    for _ in range(4):
        world.submit()
    with pytest.raises(RequestError, match="4 requests are waiting, max_waiting is 4") as refused:
        world.engine.check_room()
    assert refused.value.code is ErrorCode.UNAVAILABLE
