"""Deadlines that cannot be met are told early, and never wrongly."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from chairlift.deadlines import Deadlines, Pace, too_late
from chairlift.errors import ErrorCode
from chairlift.request import Request, SamplingParams, Status
from tests.unit.simulation import Simulation

PREFILL_TOKEN_S = 0.01
DECODE_STEP_S = 0.5


def measured() -> Pace:
    pace = Pace()
    pace.observe(DECODE_STEP_S, 4, 0)
    pace.observe(100 * PREFILL_TOKEN_S, 0, 100)
    return pace


def new_request(deadline: float | None, prompt: int = 100, **chosen: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 10, **chosen})
    return Request(0, [1] * prompt, params, seed=0, arrival=0.0, deadline=deadline)


def nothing_cached(request: Request) -> int:
    return 0


@pytest.mark.parametrize(
    ("chosen", "needed"),
    [
        ({}, 1.0),
        ({"min_tokens": 5}, 1.0 + 4 * 0.5),
        ({"ignore_eos": True}, 1.0 + 9 * 0.5),
        ({"ignore_eos": True, "stop": ("x",)}, 1.0),
    ],
)
def test_only_what_must_be_generated_counts(chosen: dict[str, Any], needed: float) -> None:
    deadlines = Deadlines(measured(), nothing_cached)
    assert deadlines.lateness(new_request(7.0 + needed + 0.01, **chosen), 7.0) == 0
    late = deadlines.lateness(new_request(7.0 + needed - 0.01, **chosen), 7.0)
    assert late == pytest.approx(0.01)


def test_the_queue_counts_on_arrival() -> None:
    deadlines = Deadlines(measured(), nothing_cached)
    assert deadlines.lateness(new_request(3.0), 0.0, queued_tokens=199) == 0
    assert deadlines.lateness(new_request(3.0), 0.0, queued_tokens=300) == pytest.approx(1.0)


def test_cached_tokens_need_no_time() -> None:
    deadlines = Deadlines(measured(), lambda request: 96)
    assert deadlines.lateness(new_request(0.1), 0.0) == 0


def test_nothing_is_judged_before_anything_is_measured() -> None:
    deadlines = Deadlines(Pace(), nothing_cached)
    assert deadlines.lateness(new_request(0.001), 0.0, queued_tokens=10**9) == 0
    assert deadlines.lateness(new_request(None), 1e9) == 0


def test_a_waiting_request_is_named_when_its_last_moment_has_passed_and_once() -> None:
    deadlines = Deadlines(measured(), nothing_cached)
    request, without = new_request(5.0), new_request(None)
    deadlines.watch(request)
    deadlines.watch(without)
    assert [deadlines.overdue(now) for now in (0.0, 3.9, 4.1, 4.2)] == [[], [], [request], []]


def test_progress_moves_the_last_moment_and_the_finished_are_forgotten() -> None:
    deadlines = Deadlines(measured(), nothing_cached)
    running, finished = new_request(5.0, min_tokens=5), new_request(5.0)
    for request in (running, finished):
        deadlines.watch(request)
    running.num_computed = 100
    for token in range(4):
        running.append_output(token)
    running.num_computed = 103
    finished.status = Status.FINISHED
    assert deadlines.overdue(4.4) == []
    assert len(deadlines) == 1
    assert deadlines.overdue(4.6) == [running]


def test_the_pace_follows_the_load_and_separates_mixed_steps() -> None:
    pace = measured()
    for _ in range(200):
        pace.observe(0.7, 8, 0)
        pace.observe(0.7 + 50 * 0.02, 8, 50)
    assert pace.decode_step_s == pytest.approx(0.7, rel=0.01)
    assert pace.prefill_token_s == pytest.approx(0.02, rel=0.01)


def test_the_error_says_how_late() -> None:
    error = too_late(1.234)
    assert "1.23 s" in error.message and error.code is ErrorCode.UNAVAILABLE


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10), st.integers(1, 60))))
def test_nobody_who_would_have_made_it_is_ended(shapes: list[tuple[int, int, int]]) -> None:
    """Whoever is named overdue is let run, and does indeed come too late."""
    sim = Simulation(60, 4, {"max_num_seqs": 3, "max_num_batched_tokens": 16})
    pace = Pace()
    pace.observe(1.0, 1, 0)
    pace.observe(1.0, 0, 16)  # a simulated step takes a second and reads 16 tokens at most
    size = sim.block_size
    deadlines = Deadlines(pace, lambda r: len(sim.kv.find_prefix(r).block_ids) * size)
    named: dict[int, float] = {}
    ended: dict[int, float] = {}

    def step() -> None:
        sim.step()
        for uid in sim.done:
            ended.setdefault(uid, sim.now)
        named.update({r.uid: r.deadline or 0.0 for r in deadlines.overdue(sim.now)})

    for index, (prompt, max_tokens, patience) in enumerate(shapes):
        deadline = sim.now + patience
        request = sim.arrive([index % 3] * prompt, max_tokens, deadline=deadline)
        deadlines.watch(request)
        for _ in range(3):
            step()
    while sim.live:
        step()
    assert all(ended[uid] > deadline for uid, deadline in named.items())
