"""The waiting room whatever the order: bounded waits, longest prefix, and the queue itself."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.kv_cache import KVCacheManager
from chairlift.prefix_match import PrefixMatch
from chairlift.queue_order import RankedQueue
from chairlift.request import Request, SamplingParams
from chairlift.waiting_room import MAX_ASIDE
from tests.unit.simulation import Simulation

ORDERS = ["fcfs", "priority", "fair", "prefix"]


def engine(order: str, num_blocks: int = 30, **chosen: Any) -> Simulation:
    chosen = {"queue_order": order, "max_num_batched_tokens": 64, "max_overtakes": 4, **chosen}
    return Simulation(num_blocks, 4, chosen)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(ORDERS),
    st.integers(4, 100),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=3, max_size=12),
    st.integers(1, 5),
)
def test_every_request_is_served_in_bounded_steps(
    order: str, size: int, others: list[tuple[int, int]], max_num_seqs: int
) -> None:
    """A flow that would fill the engine for ever, of higher priority, another tenant, and with a
    cached prefix, does not keep out one request of any size up to the pool's."""
    sim = engine(order, max_num_seqs=max_num_seqs, aging_s=2)
    longest = 24  # steps of one of the flow, preempted never
    sim.arrive([1] * 8, max_tokens=8, priority=1, tenant="flow")
    for _ in range(5):
        sim.step()
    marked = sim.arrive([3] * size, max_tokens=20, priority=3, tenant="marked")
    for index in range(600):
        prompt, max_tokens = others[index % len(others)]
        if len(sim.scheduler.waiting) < 40:
            sim.arrive([1] * prompt, max_tokens, priority=1, tenant="flow")
        sim.step()
        if marked.first_scheduled is not None:
            break
    assert marked.first_scheduled is not None
    overtakes_and_aging = (4 + MAX_ASIDE) * longest + 2 * 2 * longest
    assert marked.first_scheduled - marked.arrival <= overtakes_and_aging


def test_prefix_order_uses_a_prefix_before_it_is_evicted() -> None:
    """Three families in turn, and room in the cache for one prefix beside what runs."""
    cached = {}
    for order in ("fcfs", "prefix"):
        sim = engine(order, num_blocks=24, max_num_seqs=1, max_overtakes=16)
        requests = [
            sim.arrive([family] * 40 + [100 + index], max_tokens=8)
            for index in range(6)
            for family in range(3)
        ]
        sim.run()
        cached[order] = sum(request.num_cached for request in requests)
        assert max(request.num_overtaken for request in requests) <= 16
    assert cached["fcfs"] == 0
    assert cached["prefix"] == 3 * 5 * 40


def test_prefix_order_looks_again_in_each_step() -> None:
    kv = KVCacheManager(30, 4)
    order = PrefixMatch(kv, max_overtakes=9)
    older, younger = (Request(uid, [uid] * 9, SamplingParams(), 0, 0.0) for uid in range(2))
    order.push(older)
    order.push(younger)
    assert order.peek() is older, "the oldest, where nobody's prefix is known"
    reader = Request(2, [1] * 9, SamplingParams(), 0, 0.0)
    assert kv.allocate(reader, 9)
    order.refresh()
    assert order.peek() is younger


def test_prefix_order_passes_nobody_more_often_than_allowed() -> None:
    sim = engine("prefix", num_blocks=60, max_num_seqs=1, max_overtakes=3)
    sim.arrive([1] * 9, max_tokens=2)
    sim.step()
    stranger = sim.arrive([2] * 9, max_tokens=2)
    family = [sim.arrive([1] * 9, max_tokens=2) for _ in range(8)]
    sim.run()
    before = [r for r in family if (r.first_scheduled or 0) < (stranger.first_scheduled or 0)]
    assert len(before) == stranger.num_overtaken == 3


@pytest.mark.parametrize("order", ORDERS)
def test_cancelled_while_waiting_leaves_no_trace(order: str) -> None:
    sim = engine(order, max_num_seqs=1, max_running_per_tenant=20)
    for index in range(60):
        sim.arrive([index] * 5, max_tokens=3, tenant="ab"[index % 2])
    for uid in sorted(sim.live)[::2]:
        sim.cancel(sim.live[uid])
    assert len(sim.scheduler.waiting) == 30
    sim.run()
    assert len(sim.done) == 60


class Model:
    """A queue as a sorted list."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def head(self) -> Request | None:
        return min(self.requests, key=lambda r: (r.arrival, r.uid), default=None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "take", "discard"]), st.integers(0, 99))))
def test_ranked_queue_against_a_sorted_list(operations: list[tuple[str, int]]) -> None:
    queue, model = RankedQueue(), Model()
    for uid, (operation, number) in enumerate(operations):
        if operation == "push":
            request = Request(uid, [1], SamplingParams(), seed=0, arrival=float(number))
            queue.push(request, (request.arrival, request.uid))
            model.requests.append(request)
        elif model.requests:
            head = model.head()
            taken = head if operation == "take" else model.requests[number % len(model.requests)]
            assert taken is not None
            assert queue.discard(taken) and not queue.discard(taken)
            model.requests.remove(taken)
        assert queue.peek() is model.head()
        assert len(queue) == len(model.requests)
        assert list(queue) == sorted(model.requests, key=lambda r: (r.arrival, r.uid))
        assert len(queue._heap) <= 2 * len(queue) + 17, "the dead are cleared away"
