"""Fair share between tenants, the limits on them, and the bound that the docstring promises."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.errors import ErrorCode, RequestError
from chairlift.tenants import MAX_ACCOUNTS, Tenants
from tests.unit.simulation import Simulation

SEATS = 4
LONGEST_PROMPT = 30
LONGEST_ANSWER = 20


def engine(**chosen: Any) -> Simulation:
    chosen = {
        "queue_order": "fair",
        "max_num_seqs": SEATS,
        "max_num_batched_tokens": 48,
        "enable_prefix_caching": False,
        **chosen,
    }
    return Simulation(chosen.pop("num_blocks", 200), 4, chosen)


def served(sim: Simulation) -> Counter[str]:
    """Tokens by tenant, counted from the requests and not from the accounts."""
    tokens: Counter[str] = Counter()
    for request in [*sim.live.values(), *sim.done.values()]:
        if request.first_scheduled is not None:
            read = 0 if request.sample_index else request.num_prompt_tokens - request.num_cached
            tokens[request.tenant] += read + len(request.output_ids)
    return tokens


class Backlog:
    """Keeps tenants waiting, each with requests of its own kind."""

    def __init__(self, sim: Simulation, kinds: dict[str, tuple[int, int]], seed: int) -> None:
        self.sim = sim
        self.kinds = kinds
        self.chance = random.Random(seed)

    def refill(self, tenant: str, number: int) -> None:
        prompt, answer = self.kinds[tenant]
        for _ in range(number):
            length = self.chance.randint(1, prompt)
            max_tokens = self.chance.randint(1, answer)
            stops = self.chance.randint(1, max_tokens)
            self.sim.arrive([7] * length, max_tokens, stops_after=stops, tenant=tenant)

    def step(self, ahead: dict[str, int]) -> None:
        waiting = Counter(request.tenant for request in self.sim.scheduler.waiting)
        for tenant, number in ahead.items():
            self.refill(tenant, number - waiting[tenant])
        self.sim.step()


kinds = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER))


@settings(max_examples=25, deadline=None)
@given(kinds, kinds, st.sampled_from([1.0, 2.0, 5.0]), st.integers(0, 1000), st.integers(0, 30))
def test_two_backlogged_tenants_stay_within_the_bound(
    kind_a: tuple[int, int], kind_b: tuple[int, int], weight: float, seed: int, headstart: int
) -> None:
    """2 (P + R) / w with memory for all; it does not grow with time: every step is compared."""
    sim = engine(tenant_weights={"a": weight})
    backlog = Backlog(sim, {"a": kind_a, "b": kind_b}, seed)
    for _ in range(headstart):
        backlog.step({"b": 9})
    start = served(sim)
    bound = 2 * (LONGEST_PROMPT + SEATS * LONGEST_ANSWER)
    for _ in range(250):
        backlog.step({"a": 30, "b": 9})
        now = served(sim)
        a, b = (now["a"] - start["a"]) / weight, now["b"] - start["b"]
        assert abs(a - b) <= bound
    assert min(a, b) > bound / 4, "too little was served to say anything"


def test_first_come_is_not_within_the_bound() -> None:
    sim = engine(queue_order="fcfs")
    backlog = Backlog(sim, {"a": (LONGEST_PROMPT, LONGEST_ANSWER), "b": (10, 10)}, 1)
    for _ in range(400):
        backlog.step({"a": 60, "b": 3})
    tokens = served(sim)
    assert tokens["a"] - tokens["b"] > 2 * (LONGEST_PROMPT + SEATS * LONGEST_ANSWER)


def test_a_greedy_tenant_does_not_starve_another() -> None:
    sim = engine(max_num_seqs=2)
    for index in range(100):
        sim.arrive([index] * 10, max_tokens=10, tenant="greedy")
    for _ in range(30):
        sim.step()
    modest = [sim.arrive([1000 + i] * 10, max_tokens=10, tenant="modest") for i in range(3)]
    while any(request.first_scheduled is None for request in modest):
        sim.step()
    assert sim.now <= 30 + 4 * 10, "it has every second seat from now on"
    sim.run()


def test_a_newcomer_does_not_live_on_saved_time() -> None:
    """After a long absence it shares equally; it is not served alone until it has caught up."""
    sim = engine(max_num_seqs=2)
    backlog = Backlog(sim, {"a": (8, 8), "b": (8, 8)}, 3)
    for _ in range(200):
        backlog.step({"a": 5})
    start = served(sim)
    for _ in range(100):
        backlog.step({"a": 5, "b": 5})
    now = served(sim)
    assert now["a"] - start["a"] > 0.35 * (now["a"] + now["b"] - start["a"])


def test_weights_share_in_proportion() -> None:
    sim = engine(tenant_weights={"a": 3.0})
    backlog = Backlog(sim, {"a": (20, 20), "b": (5, 20), "c": (20, 3)}, 5)
    for _ in range(900):
        backlog.step({"a": 30, "b": 30, "c": 30})
    tokens = served(sim)
    assert 2.4 < tokens["a"] / tokens["b"] < 3.6
    assert 0.8 < tokens["b"] / tokens["c"] < 1.25


def test_within_a_tenant_it_is_first_come_first_served() -> None:
    sim = engine(max_num_seqs=1)
    requests = [sim.arrive([i] * 5, max_tokens=3, tenant="a") for i in range(5)]
    sim.run()
    starts = [request.first_scheduled or 0.0 for request in requests]
    assert starts == sorted(starts)


def test_at_most_so_many_of_a_tenant_run_at_once() -> None:
    sim = engine(queue_order="fcfs", max_running_per_tenant=2)
    greedy = [sim.arrive([i] * 5, max_tokens=5, tenant="a") for i in range(12)]
    other = sim.arrive([99] * 5, max_tokens=5, tenant="b")
    sim.step()
    assert other.first_scheduled == 1.0, "it does not wait behind those who may not run"
    sim.cancel(greedy[1])
    sim.cancel(greedy[7])
    while sim.live:
        sim.step()
        running = Counter(request.tenant for request in sim.scheduler.running)
        assert running["a"] <= 2
    starts = [r.first_scheduled for r in greedy if r.first_scheduled is not None]
    assert len(starts) == 11 and starts == sorted(starts)


def test_a_tenant_may_queue_only_so_much() -> None:
    sim = engine(max_num_seqs=1, max_queued_tokens_per_tenant=40)
    sim.arrive([1] * 100, max_tokens=20, tenant="a")  # one is always taken
    sim.step()
    sim.arrive([2] * 20, max_tokens=10, tenant="a")
    with pytest.raises(RequestError, match="30 tokens waiting.*11 of this.*40") as refusal:
        sim.arrive([3] * 10, max_tokens=1, tenant="a")
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    sim.arrive([3] * 10, max_tokens=1, tenant="b")
    cancelled = sim.arrive([4] * 9, max_tokens=1, tenant="a")
    sim.cancel(cancelled)
    sim.arrive([4] * 9, max_tokens=1, tenant="a")
    sim.run()


def test_made_up_tenants_do_not_fill_the_memory() -> None:
    tenants = Tenants({}, None)
    sim = engine()
    for index in range(3 * MAX_ACCOUNTS):
        request = sim.arrive([1], max_tokens=1, tenant=f"t{index}")
        tenants.enter(request)
        tenants.withdraw(request)
        sim.cancel(request)
    assert len(tenants._accounts) <= MAX_ACCOUNTS
