"""Random histories of the scheduler: all that can happen, in any order, checked each step."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.fake_cache import ConstantHash
from tests.unit.simulation import Simulation, Trouble

ALPHABET = 2  # so few tokens that prompts share prefixes, and outputs continue other prompts


@st.composite
def engines(draw: st.DrawFn) -> Simulation:
    """A small pool and settings that make every path likely."""
    max_num_seqs = draw(st.integers(1, 8))
    chosen: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 40)),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 4, 9])),
        "enable_chunked_prefill": draw(st.sampled_from([True, True, False])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "kv_reserve_fraction": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        "max_overtakes": draw(st.sampled_from([0, 1, 3])),
        "batching": draw(st.sampled_from(["continuous", "continuous", "dynamic", "static"])),
        "aging_s": draw(st.sampled_from([0, 4])),
        "tenant_weights": {"a": 3.0},
        "max_running_per_tenant": draw(st.sampled_from([None, None, 1, 3])),
        "batch_size": draw(st.integers(1, 4)),
        "batch_window_ms": 3000,
    }
    if chosen["batching"] == "continuous":
        chosen["queue_order"] = draw(st.sampled_from(["fcfs", "priority", "fair", "prefix"]))
    return Simulation(
        draw(st.integers(2, 20)), draw(st.sampled_from([1, 2, 4])), chosen, alphabet=ALPHABET
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, cancellations, failed steps, and steps; at the end everybody must finish."""

    @initialize(simulation=engines(), collide=st.booleans())
    def start(self, simulation: Simulation, collide: bool) -> None:
        self.sim = simulation
        self.token = ConstantHash if collide else int
        self.prompts: list[list[int]] = []
        self.batch_id = 0

    @rule(data=st.data(), number=st.integers(1, 4), same_batch=st.booleans())
    def arrive(self, data: st.DataObject, number: int, same_batch: bool) -> None:
        self.batch_id += not same_batch
        for _ in range(number):
            self._arrive_one(data)

    def _arrive_one(self, data: st.DataObject) -> None:
        limit = self.sim.kv.num_usable * self.sim.block_size
        prompt = data.draw(st.lists(st.integers(0, ALPHABET - 1), min_size=1, max_size=12))
        if self.prompts and data.draw(st.booleans()):
            earlier = data.draw(st.sampled_from(self.prompts))
            prompt = earlier[: data.draw(st.integers(1, len(earlier)))] + prompt
        prompt = [self.token(t) for t in prompt[: limit - 1]]
        room = limit - len(prompt)
        max_tokens = data.draw(st.one_of(st.integers(1, min(room, 12)), st.just(room)))
        request = self.sim.arrive(
            prompt,
            max_tokens,
            stops_after=data.draw(st.integers(1, min(max_tokens, 12))),
            n=data.draw(st.sampled_from([1, 1, 1, 2, 5])),
            prompt_logprobs=data.draw(st.sampled_from([None, None, None, 0])),
            cache_salt=data.draw(st.sampled_from(["", "", "a"])),
            batch_id=self.batch_id,
            tenant=data.draw(st.sampled_from("aabc")),
            priority=data.draw(st.integers(0, 3)),
        )
        self.prompts.append(request.token_ids)  # grows: a later prompt may continue an answer

    @rule(number=st.integers(1, 12))
    def steps(self, number: int) -> None:
        for _ in range(number):
            self.sim.step()

    @precondition(lambda self: self.sim.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.sim.live)))
        self.sim.cancel(self.sim.live[uid])

    @rule(before=st.integers(0, 3), trouble=st.sampled_from(["error", "out of memory"]))
    def a_step_fails(self, before: int, trouble: Trouble) -> None:
        self.steps(before)
        self.sim.step(trouble)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.run()
            self.sim.kv.check_integrity([])


def test_scheduler_whatever_happens() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=300,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
