"""The token budget and what happens when a step fails; every step is checked on its own as well."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.step_budget import RECOVERY_STEPS, StepBudget
from tests.unit.scheduler_cases import engine, shape, unlike
from tests.unit.simulation import Trouble


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


def test_the_step_after_a_failed_one_is_not_larger_than_half() -> None:
    """Else a limit of one token could never be reached, and the engine would retry for ever."""
    budget = StepBudget(EngineConfig(max_num_batched_tokens=512), 16)
    limits = []
    for num_tokens in (512, 256, 3, 1):
        budget.halve(num_tokens)
        budget.start_step()
        limits.append(budget.limit)
    assert limits == [256, 128, 1, 1]
    for _ in range(RECOVERY_STEPS):
        budget.start_step()
    assert budget.limit == 512


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
    for seed in range(3):
        sim.arrive(unlike(6, 2 + seed), max_tokens=9)
    sim.step()
    assert len(sim.step("out of memory").copies) == 2
    assert parent not in sim.scheduler.running, "it holds the target of a copy"
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
