"""Static, dynamic, and continuous batching: who may board, on the same scheduler."""

from __future__ import annotations

from typing import Any

from chairlift.request import Request
from tests.unit.simulation import Simulation


def engine(batching: str, **settings: Any) -> Simulation:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "batching": batching, **settings}
    return Simulation(settings.pop("num_blocks", 200), 4, settings)


def boarded(requests: list[Request]) -> list[float | None]:
    return [request.first_scheduled for request in requests]


def test_continuous_boards_and_leaves_at_every_step() -> None:
    sim = engine("continuous", max_num_seqs=2)
    requests = [sim.arrive([i] * 5, max_tokens=length) for i, length in enumerate([2, 4, 2, 2])]
    sim.run()
    assert boarded(requests) == [1.0, 1.0, 3.0, 5.0]


def test_dynamic_runs_each_delivered_batch_to_its_end() -> None:
    sim = engine("dynamic")
    first = [sim.arrive([i] * 5, max_tokens=2 + 2 * i, batch_id=1) for i in range(3)]
    sim.step()
    second = [sim.arrive([9 + i] * 5, max_tokens=2, batch_id=2) for i in range(3)]
    third = sim.arrive([20] * 5, batch_id=3)
    sim.run()
    assert boarded(first) == [1.0] * 3
    assert boarded(second) == [7.0] * 3, "the step after the longest of the first batch ended"
    assert third.first_scheduled == 9.0


def test_dynamic_boards_what_did_not_fit_as_part_of_its_batch() -> None:
    sim = engine("dynamic", num_blocks=10)
    first = [sim.arrive([i] * 12, max_tokens=8, batch_id=1) for i in range(3)]
    second = sim.arrive([9] * 5, max_tokens=2, batch_id=2)
    sim.run()
    assert boarded(first) == [1.0, 1.0, 9.0]
    assert second.first_scheduled == 17.0


def test_static_waits_until_a_batch_is_full() -> None:
    sim = engine("static", batch_size=3, batch_window_ms=100_000)
    requests = [sim.arrive([i] * 5, max_tokens=4) for i in range(2)]
    for _ in range(5):
        assert not sim.step()
    requests += [sim.arrive([5 + i] * 5, max_tokens=4) for i in range(2)]
    sim.step()
    assert boarded(requests) == [6.0, 6.0, 6.0, None], "exactly a batch"


def test_static_boards_what_is_there_when_its_window_has_passed() -> None:
    sim = engine("static", batch_size=3, batch_window_ms=4_000)
    first = sim.arrive([1] * 5)
    assert sim.policy.wake_at(sim.scheduler.waiting) == 4.0
    sim.step()
    second = sim.arrive([2] * 5)
    sim.run()
    assert boarded([first, second]) == [4.0, 4.0], "its window starts with the oldest"


def test_static_admits_nobody_until_the_whole_batch_is_done() -> None:
    sim = engine("static", batch_size=2, batch_window_ms=1_000)
    batch = [sim.arrive([i] * 5, max_tokens=2 + 8 * i) for i in range(2)]
    sim.step()
    late = [sim.arrive([5 + i] * 5) for i in range(2)]
    sim.run()
    assert boarded(batch) == [1.0, 1.0]
    assert boarded(late) == [11.0, 11.0]


def test_static_keeps_its_batch_together_when_memory_is_short() -> None:
    """Members that wait for memory, or are preempted, come before the next batch."""
    sim = engine("static", num_blocks=8, batch_size=3, batch_window_ms=0, kv_reserve_fraction=0.0)
    batch = [sim.arrive([i] * 9, max_tokens=10) for i in range(3)]
    late = [sim.arrive([5 + i] * 5, max_tokens=2) for i in range(3)]
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    last_of_batch = max(request.first_scheduled or 0.0 for request in batch)
    assert all((request.first_scheduled or 0.0) > last_of_batch for request in late)


def test_an_idle_engine_wakes_only_for_a_static_window() -> None:
    for batching in ("continuous", "dynamic"):
        sim = engine(batching)
        assert sim.policy.wake_at(sim.scheduler.waiting) is None
    assert engine("static").policy.wake_at(engine("static").scheduler.waiting) is None
