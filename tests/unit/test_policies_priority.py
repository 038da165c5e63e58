"""Priority: 1 first as in Triton, nothing inverted beyond aging, and nobody waits for ever."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.config import EngineConfig
from chairlift.queue_order import Priority
from chairlift.request import Request
from tests.unit.simulation import Simulation


def engine(**chosen: Any) -> Simulation:
    chosen = {"queue_order": "priority", "max_num_batched_tokens": 64, **chosen}
    return Simulation(chosen.pop("num_blocks", 400), 4, chosen)


def waiting(sim: Simulation) -> list[Request]:
    return [request for request in sim.scheduler.waiting if request.first_scheduled is None]


def test_F4_a_high_one_starts_before_queued_low_ones() -> None:
    sim = engine(max_num_seqs=2)
    long_low = [sim.arrive([i] * 5, max_tokens=30 + 9 * i, priority=3) for i in range(2)]
    sim.step()
    low = [sim.arrive([9 + i] * 5, max_tokens=5, priority=3) for i in range(5)]
    unsaid = sim.arrive([20] * 5, max_tokens=5)
    sim.step()
    high = sim.arrive([21] * 5, max_tokens=5, priority=1)
    sim.run()
    assert all(request.num_preemptions == 0 for request in long_low)
    starts = [request.first_scheduled or 0.0 for request in (high, *low, unsaid)]
    assert starts == sorted(starts), "5, the default level, comes last"
    assert starts[0] < starts[1]


def test_F4_preemption_takes_the_lowest_priority_first() -> None:
    sim = engine(num_blocks=14, kv_reserve_fraction=0.0, aging_s=0)
    low = sim.arrive([1] * 8, max_tokens=20, priority=3)
    sim.step()
    high = [sim.arrive([2 + i] * 8, max_tokens=20, priority=1) for i in range(2)]
    sim.run()
    assert low.num_preemptions > 0
    assert [request.num_preemptions for request in high] == [0, 0]


def test_a_high_one_passes_a_big_low_one_that_stands_aside() -> None:
    """Passing by right of priority is no overtaking; the count is for those who come after."""
    sim = engine(num_blocks=12, max_overtakes=1, aging_s=0)
    sim.arrive([1] * 4, max_tokens=24, priority=3)
    sim.step()
    big = sim.arrive([2] * 40, max_tokens=4, priority=3)
    passing, low = (sim.arrive([3 + i] * 4, max_tokens=4, priority=3) for i in range(2))
    sim.step()
    assert passing.first_scheduled == sim.now and big.num_overtaken == 1
    high = sim.arrive([9] * 4, max_tokens=4, priority=1)
    sim.step()
    assert high.first_scheduled == sim.now and big.num_overtaken == 1
    assert low.first_scheduled is None
    sim.run()


arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 8)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(arrivals, st.sampled_from([0, 2, 10]), st.integers(1, 3))
def test_priority_never_inverts(
    flow: list[tuple[int, int, int]], aging_s: int, max_num_seqs: int
) -> None:
    """Whoever boards has a better rank than everybody it leaves behind."""
    sim = engine(max_num_seqs=max_num_seqs, aging_s=aging_s)
    rank = sim.waiting.order.rank
    for index, (pause, priority, max_tokens) in enumerate(flow):
        sim.arrive([index] * 5, max_tokens=max_tokens, priority=priority)
        for _ in range(pause):
            before = waiting(sim)
            sim.step()
            left = waiting(sim)
            boarded = [request for request in before if request.first_scheduled == sim.now]
            assert not left or not boarded or max(map(rank, boarded)) < min(map(rank, left))
    sim.run()


@pytest.mark.parametrize("aging_s", [1, 5])
def test_aging_ends_every_wait(aging_s: int) -> None:
    """A flow of priority 1 that alone fills the engine delays a 4 by three levels' worth."""
    sim = engine(max_num_seqs=1, aging_s=aging_s)
    sim.arrive([0] * 5, max_tokens=2, priority=1)
    low = sim.arrive([1] * 5, max_tokens=2, priority=4)
    for index in range(200):
        sim.arrive([2 + index] * 5, max_tokens=2, priority=1)
        sim.step()
        if low.first_scheduled is not None:
            break
    assert low.first_scheduled is not None
    backlog_when_its_turn_comes = 3 * aging_s
    assert 3 * aging_s <= low.first_scheduled <= 3 * aging_s + 2 * backlog_when_its_turn_comes + 4


def test_without_aging_levels_are_strict() -> None:
    order = Priority(default_level=5, aging_s=0.0)
    sim = engine()
    old_low = sim.arrive([1], priority=2)
    sim.now = 1e9
    new_high = sim.arrive([2], priority=1)
    assert order.outranks(new_high, old_low)
    assert not Priority(5, 30.0).outranks(new_high, old_low)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="default_priority_level"):
        EngineConfig(priority_levels=3, default_priority_level=4)
    with pytest.raises(ValueError, match="queue_order 'fair' needs continuous"):
        EngineConfig(batching="static", queue_order="fair")
    with pytest.raises(ValueError, match="queue_order 'fair' must see the whole queue"):
        EngineConfig(when_full="block", queue_order="fair")
