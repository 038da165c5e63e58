"""The scheduler, case by case; every step of a Simulation is checked on its own as well."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chairlift.scheduler import StepPlan
from tests.unit.simulation import Simulation, Trouble


def engine(num_blocks: int = 100, block_size: int = 4, **settings: Any) -> Simulation:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    return Simulation(num_blocks, block_size, settings)


def shape(plan: StepPlan) -> tuple[int, list[int]]:
    """How many decodes, and the lengths of the prompt chunks."""
    return len(plan.decodes), [row.num_tokens for row in plan.prefills]


def unlike(length: int, seed: int) -> list[int]:
    """A prompt that shares no block with one of another seed."""
    return [seed, *random.Random(seed).choices(range(100_000), k=length - 1)]


# ---------------------------------------------------------------- the token budget


def test_decodes_come_first_and_prompts_take_the_rest() -> None:
    sim = engine()
    sim.arrive(unlike(8, 1))
    assert shape(sim.step()) == (0, [8])
    sim.arrive(unlike(60, 2))
    sim.arrive(unlike(5, 3))
    assert shape(sim.step()) == (1, [28]), "whole blocks"
    assert shape(sim.step()) == (1, [28])
    assert shape(sim.step()) == (1, [4, 5])
    assert shape(sim.step()) == (3, [])


def test_a_cap_keeps_long_prompts_from_stalling_the_rest() -> None:
    sim = engine(long_prefill_token_threshold=8)
    sim.arrive(unlike(40, 1), max_tokens=1)
    assert shape(sim.step()) == (0, [32]), "alone it knows no cap"
    sim.arrive(unlike(40, 2), max_tokens=1)
    sim.arrive(unlike(6, 3), max_tokens=3)
    assert shape(sim.step()) == (0, [8, 8, 6])
    assert shape(sim.step()) == (1, [8])
    sim.run()


def test_budget_smaller_than_a_block_still_makes_progress() -> None:
    sim = engine(block_size=16, max_num_seqs=3, max_num_batched_tokens=3)
    for seed in range(3):
        sim.arrive(unlike(40, seed), max_tokens=20)
    sim.run()


def test_without_chunked_prefill_prompts_are_read_whole() -> None:
    sim = engine(enable_chunked_prefill=False, long_prefill_token_threshold=4)
    sim.arrive(unlike(20, 1), max_tokens=3)
    sim.arrive(unlike(20, 2), max_tokens=3)
    assert shape(sim.step()) == (0, [20])
    assert shape(sim.step()) == (1, [20])
    sim.run()


def test_without_chunked_prefill_a_prompt_longer_than_a_step_gets_steps_of_its_own() -> None:
    sim = engine(enable_chunked_prefill=False)
    sim.arrive(unlike(4, 1), max_tokens=3)
    sim.step()
    sim.arrive(unlike(70, 2), max_tokens=3)
    sim.arrive(unlike(4, 3), max_tokens=3)
    shapes = [shape(sim.step()) for _ in range(5)]
    assert shapes == [(1, []), (1, []), (0, [32]), (0, [32]), (0, [6, 4])]
    sim.run()


def test_after_running_out_of_memory_steps_shrink_and_recover() -> None:
    sim = engine()
    for seed in range(3):
        sim.arrive(unlike(32, seed), max_tokens=4)
    assert sim.step("out of memory").num_tokens == 32
    assert sim.step("out of memory").num_tokens == 16
    assert sim.step().num_tokens == 8
    assert sim.step().num_tokens == 8, "the limit is 9 now, but chunks are whole blocks"
    sim.run()
    for seed in range(200):
        sim.arrive(unlike(3, seed), max_tokens=1)
    sim.run()
    sim.arrive(unlike(32, 999))
    assert sim.step().num_tokens == 32


def test_a_limit_below_the_number_of_decodes_preempts_the_newest() -> None:
    sim = engine()
    requests = [sim.arrive(unlike(4, seed), max_tokens=9) for seed in range(6)]
    sim.step()
    sim.step("out of memory")
    assert sim.scheduler.running == requests[:3]
    assert [r.num_preemptions for r in requests] == [0, 0, 0, 1, 1, 1]
    sim.run()


@pytest.mark.parametrize("trouble", ["error", "out of memory"])
def test_nobody_counts_on_what_a_step_failed_to_compute(trouble: Trouble) -> None:
    """Two read their common prompt together, the step fails, and the one who was to read goes."""
    sim = engine(max_num_batched_tokens=16)
    first = sim.arrive([*unlike(8, 1), 2], max_tokens=9)
    second = sim.arrive([*unlike(8, 1), 3, 4], max_tokens=9)
    assert shape(sim.step(trouble)) == (0, [9, 2])
    if trouble == "out of memory":
        sim.cancel(first)
    sim.run()
    assert len(second.output_ids) == (0 if trouble == "error" else 9)


def test_a_copy_that_a_failed_step_was_to_make_is_not_counted_on() -> None:
    sim = engine()
    parent = sim.arrive(unlike(6, 1), max_tokens=9, n=3)
    sim.step()
    assert len(sim.step("out of memory").copies) == 2
    sim.cancel(parent)
    sim.run()


def test_a_failed_step_ends_its_requests_and_nobody_else() -> None:
    sim = engine(max_num_batched_tokens=8)
    first = sim.arrive(unlike(8, 1))
    second = sim.arrive(unlike(8, 1)[:4] + unlike(4, 2))
    sim.step("error")
    assert first.uid in sim.done and second.uid in sim.live
    sim.run()
    assert second.num_cached == 0, "what a failed step wrote was found"


# ---------------------------------------------------------------- prefix sharing


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
    sim = engine(max_num_batched_tokens=8, max_num_seqs=4)
    sim.arrive(unlike(16, 1), n=3)
    sim.arrive(unlike(4, 2))
    waiting = sim.arrive(unlike(4, 3))
    while len(sim.scheduler.running) < 4:
        sim.step()
    assert waiting in list(sim.scheduler.waiting)
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


# ---------------------------------------------------------------- memory


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
