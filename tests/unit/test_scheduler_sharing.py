"""Prefix sharing, forks, and what preemption and cancellation do to them."""

from __future__ import annotations

import random

import pytest

from tests.unit.scheduler_cases import engine, shape, unlike
from tests.unit.simulation import Simulation


def test_the_classic_case_a_system_prompt_of_200_tokens_and_32_requests_at_once() -> None:
    """Its 12 full blocks exist once: 31 x 192 = 5,952 tokens are neither computed nor kept."""
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
    sim = Simulation(600, 16, settings)
    prefix = unlike(200, 0)
    requests = [sim.arrive(prefix + unlike(32, 1 + i), max_tokens=32) for i in range(32)]
    assert len(sim.step().prefills) == 32, "all board in the step that computes the prefix"
    assert sum(request.num_cached for request in requests) == 31 * 192 == 5_952
    tables = {tuple(request.block_ids[:12]) for request in requests}
    assert len(tables) == 1
    assert sim.kv.num_used == 12 + 32 * 3
    sim.run()
    total = sum(request.num_prompt_tokens + 32 - 1 for request in requests)
    assert sim.num_computed_tokens == total - 5_952


def test_two_long_prompts_read_their_common_part_together() -> None:
    """Under a cap each reads a part, and takes over what the other has read."""
    sim = engine(long_prefill_token_threshold=8)
    prompt = unlike(64, 1)
    requests = [sim.arrive([*prompt, i], max_tokens=2) for i in range(2)]
    sim.run()
    assert sum(sim.history[r.uid].computed for r in requests) == 64 + 2 * 1 + 2 * 1
    assert sum(request.num_cached for request in requests) == 64


def test_forks_share_the_prompt() -> None:
    sim = engine()
    sim.arrive(unlike(10, 1), max_tokens=9, n=4)
    sim.step()
    assert sim.kv.num_used == 3
    plan = sim.step()
    assert len(plan.decodes) == 4 and len(plan.copies) == 3
    assert sim.kv.num_used == 2 + 4
    sim.run()
    assert len(sim.done) == 4


def test_more_forks_than_seats_take_turns() -> None:
    sim = engine(max_num_seqs=3)
    sim.arrive(unlike(10, 1), max_tokens=5, n=8)
    sim.run()
    assert len(sim.done) == 8
    assert sim.num_computed_tokens < 10 + 8 * (5 + 4), "late ones found the prompt cached"


def test_seats_are_kept_for_forks_to_come() -> None:
    sim = engine(max_num_batched_tokens=12, max_num_seqs=4)
    sim.arrive(unlike(16, 1), n=3)
    boarding, waiting = sim.arrive(unlike(4, 2)), sim.arrive(unlike(4, 3))
    assert shape(sim.step()) == (0, [12])
    assert shape(sim.step()) == (0, [4, 4]), "there are tokens and a seat, but the seat is taken"
    assert boarding.first_scheduled is not None and waiting.first_scheduled is None
    assert len(sim.scheduler.running) == 4
    sim.run()


def test_K3_preempted_requests_that_hit_the_cache_on_their_way_back() -> None:
    sim = Simulation(32, 16, {"kv_reserve_fraction": 0.0, "max_num_seqs": 16})
    prefix = unlike(80, 0)
    requests = [sim.arrive(prefix + unlike(5, 1 + i), max_tokens=100) for i in range(16)]
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert all(len(request.output_ids) == 100 for request in requests)


def test_K5_cancel_and_retry_on_a_shared_prefix_harms_nobody() -> None:
    """The simulated cache checks after each step that everybody reads its own prefix."""
    chance = random.Random(5)
    sim = Simulation(60, 4, {"max_num_seqs": 10, "max_num_batched_tokens": 64})
    prefix = unlike(32, 0)
    for round_ in range(30):
        sharers = [sim.arrive([*prefix, round_, i], max_tokens=8) for i in range(6)]
        for i in range(4):
            sim.arrive(unlike(20, 100 * round_ + i), max_tokens=8)
        for _ in range(chance.randrange(6)):
            sim.step()
        for request in chance.sample(sharers, 2):
            if request.uid in sim.live:
                sim.cancel(request)
            sim.arrive(request.prompt_ids, max_tokens=8)
        sim.run()


@pytest.mark.parametrize("reserve", [0.0, 0.5])
def test_K7_a_seeded_request_draws_the_same_tokens_after_preemption(reserve: float) -> None:
    answers = []
    for num_blocks, fraction in ((1000, 1.0), (32, reserve)):
        sim = Simulation(num_blocks, 16, {"kv_reserve_fraction": fraction})
        requests = [sim.arrive(unlike(64, i), max_tokens=96) for i in range(8)]
        sim.run()
        answers.append([request.output_ids for request in requests])
    assert sim.scheduler.num_preemptions > 0
    assert answers[0] == answers[1]


@pytest.mark.parametrize("batching", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("n", [1, 3])
def test_K9_a_request_of_exactly_the_pools_size_runs(batching: str, n: int) -> None:
    sim = engine(num_blocks=5, batching=batching, batch_size=2, batch_window_ms=2000)
    sim.arrive(unlike(8, 1), max_tokens=4)
    sim.arrive(unlike(7, 2), max_tokens=13, n=n)
    sim.arrive(unlike(19, 3), max_tokens=1)
    sim.run()
    assert len(sim.done) == 2 + n


def test_K10_cached_counts_are_hits_and_not_recomputed_tokens() -> None:
    sim = Simulation(12, 16, {"kv_reserve_fraction": 0.0})
    prompt = unlike(5 * 16 + 3, 1)
    cold = sim.arrive(prompt, max_tokens=2)
    sim.run()
    warm = sim.arrive(prompt, max_tokens=2)
    sim.run()
    assert (cold.num_cached, warm.num_cached) == (0, 80)
    requests = [sim.arrive(unlike(20, 10 + i), max_tokens=60) for i in range(6)]
    sim.run()
    assert sim.scheduler.num_preemptions > 0
    assert [request.num_cached for request in requests] == [0] * 6


def test_K10_forks_without_a_seat_do_not_count_their_prompt_as_cached() -> None:
    sim = engine(max_num_seqs=2)
    request = sim.arrive(unlike(12, 1), max_tokens=4, n=4)
    sim.run()
    assert [sim.done[request.uid + i].num_cached for i in range(4)] == [0] * 4


def test_K11_prompt_logprobs_are_computed_for_every_prompt_token() -> None:
    sim = engine()
    prompt = unlike(40, 1)
    sim.arrive(prompt)
    sim.run()
    for _ in range(2):
        scored = sim.arrive(prompt, prompt_logprobs=1)
        sim.run()
        assert scored.num_cached == 0
        assert sim.history[scored.uid].computed == 40 + 15
