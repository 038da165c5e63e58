"""What is observed becomes vLLM's metrics, TensorRT-LLM's and our own; totals never fall."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from chairlift.errors import ErrorCode
from chairlift.metrics import MetricBook
from chairlift.observations import Observations
from chairlift.request_log import RequestLog
from chairlift.telemetry import EngineFigures, EngineLimits, Telemetry
from tests.unit.metrics_harness import FakeSink, answer, step, take_token

RESTING = EngineFigures("serving", 0.1, 0, 0, 0, 0, 0, 0, 0, 0, 1 << 30, 0)


class Watched:
    """Telemetry over observations that a test makes, an engine it describes, and a fake server."""

    def __init__(self, *, max_tenants: int = 2) -> None:
        self.now = 200.0
        self.figures = RESTING
        self.seen = Observations(lambda: self.now)
        self.sink = FakeSink()
        self._times = count()
        self.telemetry = Telemetry(
            self.seen,
            self._read,
            EngineLimits(max_num_seqs=8, num_blocks=100, block_size=16, max_tenants=max_tenants),
            book=MetricBook(self.sink, {"model": "llm", "version": "1"}),
            log=RequestLog(enabled=False, prompts=False),
            wall_clock=lambda: 1_700_000_000.0 + self.now,
        )

    def _read(self) -> EngineFigures:
        self.now += 1.0
        return self.figures

    def value(self, name: str, **labels: str) -> float:
        self.telemetry.flush()
        return self.sink.scrape(next(self._times)).value(name, **labels)

    def run(self, request: Any, *times: float, reasons: tuple[str, ...] = ("length",)) -> None:
        """One answer's tokens at these moments, then its end."""
        for now in times:
            take_token(self.seen, request, 0, now)
        request.record.finish_reasons = list(reasons)
        self.seen.on_ended(request, None)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_times_of_a_request_add_up(watched: Watched) -> None:
    watched.run(answer(first_scheduled=100.25), 100.75, 101.0, 101.5, 102.75)
    expected = {
        "vllm:time_to_first_token_seconds": 0.75,
        "vllm:request_queue_time_seconds": 0.25,
        "vllm:request_prefill_time_seconds": 0.5,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:request_inference_time_seconds": 2.5,
        "vllm:e2e_request_latency_seconds": 2.75,
        "vllm:inter_token_latency_seconds": 2.0,
        "vllm:time_per_output_token_seconds": 2.0,
        "vllm:request_time_per_output_token_seconds": 2.0 / 3,
    }
    sums = {name: watched.value(f"{name}_sum") for name in expected}
    assert sums == pytest.approx(expected)
    counts = {name: watched.value(f"{name}_count") for name in expected}
    between = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    assert counts == {name: 3.0 if name in between else 1.0 for name in expected}


def test_tokens_are_counted_prompts_in_full(watched: Watched) -> None:
    watched.run(answer(prompt=40, num_cached_tokens=32, first_scheduled=100.0), 101.0, 102.0)
    assert watched.value("vllm:prompt_tokens_total") == 40
    assert watched.value("vllm:prompt_tokens_cached_total") == 32
    assert watched.value("vllm:prefix_cache_queries_total") == 40
    assert watched.value("vllm:prefix_cache_hits_total") == 32
    assert watched.value("vllm:generation_tokens_total") == 2
    assert watched.value("vllm:request_prefill_kv_computed_tokens_sum") == 8
    assert watched.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="reused") == 2
    assert watched.value("nv_llm_input_token_len_sum") == 40
    assert watched.value("nv_llm_output_token_len_sum") == 2


def test_the_timestamp_comes_last_and_is_the_moment_of_counting(watched: Watched) -> None:
    watched.run(answer(first_scheduled=100.25), 100.75, 101.0)
    watched.telemetry.flush()
    last = watched.sink.last_called
    stamps = [
        series
        for (name, labels), series in watched.sink.series_made.items()
        if name == "nv_trt_llm_general_metrics" and ("general_type", "timestamp") in labels
    ]
    assert [last] == stamps
    assert last is not None and last.value == (1_700_000_000 + 200) * 1e6


def test_the_answers_of_one_request_have_gaps_of_their_own(watched: Watched) -> None:
    """n = 2: tokens of the two answers alternate; nobody's gap is the time to the other's token."""
    request = answer(n=2, first_scheduled=100.0)
    for now in (101.0, 102.0, 103.0):
        for index in (0, 1):
            take_token(watched.seen, request, index, now + index / 100)
    request.record.finish_reasons = ["stop", "length"]
    watched.seen.on_ended(request, None)
    assert watched.value("vllm:inter_token_latency_seconds_count") == 4
    assert watched.value("vllm:inter_token_latency_seconds_sum") == pytest.approx(4.0)
    assert watched.value("vllm:time_to_first_token_seconds_count") == 1
    assert watched.value("vllm:request_success_total", finished_reason="stop") == 1
    assert watched.value("vllm:request_success_total", finished_reason="length") == 1
    assert watched.value("vllm:request_params_n_sum") == 2


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.CANCELLED, "abort"),
        (ErrorCode.INTERNAL, "error"),
        (ErrorCode.UNAVAILABLE, "error"),
    ],
)
def test_requests_that_were_cut_off_count_once(
    watched: Watched, code: ErrorCode, reason: str
) -> None:
    request = answer(n=2, first_scheduled=100.0, finish_reasons=["stop"])
    take_token(watched.seen, request, 0, 101.0)
    watched.seen.on_ended(request, code)
    assert watched.value("vllm:request_success_total", finished_reason=reason) == 1
    assert watched.value("vllm:request_success_total") == 2
    assert watched.value("vllm:e2e_request_latency_seconds_count") == 0
    assert watched.value("chairlift:wasted_tokens_total", reason="aborted") == 1


def test_requests_that_never_ran_leave_no_times(watched: Watched) -> None:
    watched.seen.on_ended(answer(), ErrorCode.CANCELLED)
    assert watched.value("vllm:request_success_total", finished_reason="abort") == 1
    assert watched.value("vllm:request_queue_time_seconds_count") == 0
    assert watched.value("vllm:prompt_tokens_total") == 0


def test_refusals_are_counted_by_code(watched: Watched) -> None:
    for code in (ErrorCode.INVALID_ARG, ErrorCode.INVALID_ARG, ErrorCode.UNAVAILABLE):
        watched.seen.on_refused(code)
    assert watched.value("chairlift:requests_refused_total", code="invalid_arg") == 2
    assert watched.value("chairlift:requests_refused_total", code="unavailable") == 1


def test_steps_by_what_they_computed(watched: Watched) -> None:
    for stats in (
        step(),
        step(num_decodes=3, num_prefills=2, num_prefill_tokens=50, num_recomputed_tokens=7),
        step(num_decodes=0, num_prefills=1, num_prefill_tokens=64),
    ):
        watched.seen.on_step(stats)
    steps = {
        k: watched.value("chairlift:steps_total", kind=k) for k in ("decode", "mixed", "prefill")
    }
    assert steps == {"decode": 1, "mixed": 1, "prefill": 1}
    assert watched.value("chairlift:step_tokens_total", kind="decode") == 7
    assert watched.value("chairlift:step_tokens_total", kind="prefill") == 114
    assert watched.value("vllm:iteration_tokens_total_sum") == 121
    assert watched.value("chairlift:step_rows_sum") == 10
    assert watched.value("chairlift:step_seconds_sum") == pytest.approx(0.06)
    assert watched.value("chairlift:schedule_seconds_total") == pytest.approx(0.003)
    assert watched.value("chairlift:wasted_tokens_total", reason="recomputed") == 7
    general = watched.value("nv_trt_llm_general_metrics", general_type="iteration_counter")
    assert general == 3


def test_last_step_is_shown_while_something_runs_and_nothing_at_rest(watched: Watched) -> None:
    watched.figures = RESTING._replace(num_running=4)
    watched.seen.on_step(step(num_decodes=3, num_prefills=1, num_prefill_tokens=9))
    shown = ("nv_trt_llm_inflight_batcher_metrics", "inflight_batcher_specific_metric")
    assert watched.value(shown[0], **{shown[1]: "total_context_tokens"}) == 9
    assert watched.value(shown[0], **{shown[1]: "generation_requests"}) == 3
    assert watched.value("nv_trt_llm_request_metrics", request_type="scheduled") == 4
    watched.figures = RESTING
    assert watched.value(shown[0]) == 0
    assert watched.value("nv_trt_llm_request_metrics", request_type="scheduled") == 0


def test_levels_are_the_engines_own(watched: Watched) -> None:
    watched.figures = RESTING._replace(
        state="draining", num_running=3, num_waiting=2, blocks_used=25, blocks_cached=5, num_open=6
    )
    assert watched.value("vllm:num_requests_running") == 3
    assert watched.value("vllm:num_requests_waiting") == 2
    assert watched.value("vllm:kv_cache_usage_perc") == 0.25
    assert watched.value("chairlift:engine_state") == 1
    assert watched.value("chairlift:engine_state", state="draining") == 1
    assert watched.value("chairlift:kv_blocks_cached") == 5
    assert watched.value("chairlift:requests_open") == 6
    blocks = {
        kind: watched.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        for kind in ("max", "free", "used", "tokens_per", "fraction")
    }
    assert blocks == {"max": 100, "free": 75, "used": 25, "tokens_per": 16, "fraction": 0.25}
    requests = {
        kind: watched.value("nv_trt_llm_request_metrics", request_type=kind)
        for kind in ("active", "max", "waiting")
    }
    assert requests == {"active": 5, "max": 8, "waiting": 2}


def test_h3_running_totals_that_fall_take_nothing_back(watched: Watched) -> None:
    for total in (5, 3, 4):
        watched.figures = RESTING._replace(num_preemptions=total, num_evictions=total)
        watched.telemetry.flush()
    assert watched.value("vllm:num_preemptions_total") == 6
    assert watched.value("chairlift:kv_evictions_total") == 6


def test_tenants_are_bounded(watched: Watched) -> None:
    for number in range(100):
        watched.run(answer(number, tenant=f"t{number}", first_scheduled=100.0), 101.0)
    watched.run(answer(200, first_scheduled=100.0), 101.0)
    watched.telemetry.flush()
    shown = watched.sink.scrape().by_label("chairlift:tenant_generation_tokens_total", "tenant")
    assert shown == {"t0": 1, "t1": 1, "other": 98, "none": 1}


def test_recent_steps_are_bounded_and_in_order(watched: Watched) -> None:
    for number in range(100):
        watched.seen.on_step(step(num_decodes=number))
    watched.telemetry.flush()
    recent = watched.telemetry.recent_steps()
    assert [decodes for decodes, _, _ in recent] == list(range(84, 100))
    assert recent[0] == (84, 0, pytest.approx(20.0))


def test_nothing_is_kept_after_a_flush(watched: Watched) -> None:
    watched.run(answer(first_scheduled=100.0), 101.0, 102.0)
    watched.seen.on_step(step())
    watched.seen.on_overrun()
    watched.seen.on_refused(ErrorCode.INTERNAL)
    watched.telemetry.flush()
    seen = watched.seen
    assert not (seen.gaps or seen.first_tokens or seen.ended or seen.steps or seen.refused)
    assert not seen._last_token
    assert watched.value("chairlift:wasted_tokens_total", reason="overrun") == 1
