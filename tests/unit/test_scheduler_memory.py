"""Memory: who boards when it is short, who is preempted, and that nobody waits for ever."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from tests.unit.scheduler_cases import engine, unlike
from tests.unit.simulation import Simulation


def test_F2_small_requests_pass_a_big_one_a_bounded_number_of_times() -> None:
    sim = engine(num_blocks=20, max_overtakes=5)
    sim.arrive(unlike(4, 0), max_tokens=36)  # half of the pool, for 36 steps
    sim.step()
    big = sim.arrive(unlike(40, 1), max_tokens=20)
    boarded_before = []
    for seed in range(200):
        small = sim.arrive(unlike(4, 2 + seed), max_tokens=4)
        sim.step()
        if big.first_scheduled is None and small.first_scheduled is not None:
            boarded_before.append(small)
        if big.first_scheduled is not None:
            break
    assert len(boarded_before) == big.num_overtaken == 5
    assert sim.now <= 36 + 8, "it boards when what ran before it has left"
    sim.run()


def test_F2_many_small_ones_at_once_do_not_pass_more_often() -> None:
    sim = engine(num_blocks=20, max_overtakes=2)
    sim.arrive(unlike(4, 0), max_tokens=36)
    sim.step()
    big = sim.arrive(unlike(40, 1), max_tokens=20)
    small = [sim.arrive(unlike(4, 2 + seed), max_tokens=4) for seed in range(6)]
    sim.step()
    assert [s.first_scheduled is not None for s in small] == [True] * 2 + [False] * 4
    assert big.num_overtaken == 2
    sim.run()


def test_F2_strict_order_is_a_setting() -> None:
    sim = engine(num_blocks=20, max_overtakes=0)
    sim.arrive(unlike(4, 0), max_tokens=36)
    sim.step()
    big, small = sim.arrive(unlike(40, 1), max_tokens=20), sim.arrive(unlike(4, 2), max_tokens=4)
    sim.run()
    assert big.first_scheduled is not None and small.first_scheduled is not None
    assert big.first_scheduled <= small.first_scheduled


@pytest.mark.parametrize("reserve", [0.0, 0.2, 0.5, 1.0])
def test_F5_no_preempting_in_circles(reserve: float) -> None:
    """Recomputed tokens stay below half of the useful ones, and nobody is thrown out twice."""
    sim = Simulation(32, 16, {"kv_reserve_fraction": reserve, "enable_prefix_caching": False})
    requests = [sim.arrive(unlike(60, i), max_tokens=100) for i in range(16)]
    sim.run()
    useful = sum(request.num_tokens - 1 for request in requests)
    assert sim.num_computed_tokens - useful < 0.5 * useful
    assert max(request.num_preemptions for request in requests) <= 1
    alone = Simulation(32, 16, {"max_num_seqs": 3})
    for i in range(16):
        alone.arrive(unlike(60, i), max_tokens=100)
    alone.run()
    assert alone.num_steps >= 0.7 * sim.num_steps, "overcommitting makes it slower"


def test_F5_nobody_passes_a_preempted_request() -> None:
    """Small ones that board while it waits would push out the next one."""
    sim = engine(num_blocks=12, kv_reserve_fraction=0.0)
    requests = [sim.arrive(unlike(8, i), max_tokens=30) for i in range(3)]
    while not sim.scheduler.num_preemptions:
        sim.step()
    preempted = requests[-1]
    small = sim.arrive(unlike(4, 9), max_tokens=2)
    while preempted not in sim.scheduler.running:
        assert small.first_scheduled is None
        sim.step()
    sim.run()


def test_full_reservation_never_preempts_decoding_requests() -> None:
    chance = random.Random(1)
    for seed in range(20):
        sim = Simulation(40, 4, {"max_num_batched_tokens": 512, "enable_prefix_caching": False})
        for i in range(40):
            prompt = unlike(chance.randrange(1, 40), 1000 * seed + i)
            sim.arrive(prompt, max_tokens=chance.randrange(1, 60))
            if chance.random() < 0.3:
                sim.step()
        sim.run()
        assert sim.scheduler.num_preemptions == 0


def test_overcommitting_serves_more_at_once_where_answers_end_early() -> None:
    steps = []
    for reserve in (1.0, 0.2):
        sim = Simulation(64, 16, {"kv_reserve_fraction": reserve, "max_num_seqs": 64})
        for i in range(64):
            sim.arrive(unlike(30, i), max_tokens=200, stops_after=20 + i % 20)
        sim.run()
        steps.append(sim.num_steps)
    assert steps[1] < 0.6 * steps[0]


def test_blocks_of_a_cancelled_request_are_used_by_the_next_step() -> None:
    sim = engine(num_blocks=10)
    holder = sim.arrive(unlike(20, 1), max_tokens=20)
    sim.step()
    waiting = sim.arrive(unlike(20, 2), max_tokens=20)
    sim.step()
    assert waiting.first_scheduled is None
    sim.cancel(holder)
    sim.step()
    assert waiting.first_scheduled == sim.now


def test_cancelling_a_waiting_a_preempted_and_a_forked_request() -> None:
    sim = engine(num_blocks=8, kv_reserve_fraction=0.0)
    parent = sim.arrive(unlike(6, 1), max_tokens=20, n=2)
    other = sim.arrive(unlike(6, 2), max_tokens=20)
    queued = sim.arrive(unlike(6, 3), max_tokens=20)
    sim.cancel(queued)
    sim.step()
    sim.cancel(sim.live[parent.uid + 1])  # before its unfinished block was copied
    while not other.num_preemptions:
        sim.step()
    sim.cancel(other)
    sim.run()
    assert len(parent.output_ids) == 20


def test_a_waiting_request_costs_nothing_while_nothing_changes(monkeypatch: Any) -> None:
    sim = engine(num_blocks=12)
    sim.arrive(unlike(4, 0), max_tokens=40)
    sim.step()
    for seed in range(30):
        sim.arrive(unlike(40, 1 + seed), max_tokens=4)
    sim.step()
    lookups: list[int] = []
    find = sim.kv.find_prefix
    monkeypatch.setattr(sim.kv, "find_prefix", lambda r: lookups.append(r.uid) or find(r))
    for _ in range(20):
        sim.step()
    assert not lookups


def test_slots_that_hold_no_token_are_few() -> None:
    """64 mixed requests at once, lengths log-normal as in workload A: below 4 % of what is used."""
    chance = random.Random(1234)

    def length(median: float, low: int, high: int) -> int:
        return max(low, min(high, round(median * math.exp(chance.gauss(0, 0.8)))))

    sim = Simulation(4000, 16, {"max_num_seqs": 64, "max_num_batched_tokens": 512})
    for seed in range(64):
        sim.arrive(unlike(length(96, 16, 512), seed), max_tokens=length(64, 8, 256))
    slots = tokens = 0
    while sim.live:
        sim.step()
        slots += sim.kv.num_used * 16
        tokens += sum(request.num_computed for request in sim.scheduler.running)
    assert 1 - tokens / slots < 0.04
