"""Metrics reach the server in few calls, exactly, and never in a way that it refuses."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.metric_names import ALL, Kind, own, trtllm, vllm
from chairlift.metric_names.spec import Spec, counter, gauge, histogram
from chairlift.metrics import BucketCounters, MetricBook, NativeHistogram
from tests.unit.metrics_harness import FakeSink

LABELS = {"model": "llm", "version": "1"}


def book(*specs: Spec, **options: bool) -> tuple[FakeSink, MetricBook]:
    sink = FakeSink(**options)
    return sink, MetricBook(sink, LABELS, specs or ALL)


def test_names_are_unique_and_counters_end_in_total() -> None:
    exposed = [name for spec in ALL for name in spec.exposed()]
    assert len(set(exposed)) == len(exposed)
    for spec in ALL:
        if spec.kind is Kind.COUNTER and spec is not trtllm.DISAGGREGATED:
            assert spec.name.endswith("_total"), spec.name
        assert spec.name.startswith(("vllm:", "nv_trt_llm_", "nv_llm_", "chairlift:"))
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert bool(spec.buckets) == (spec.kind is Kind.HISTOGRAM), spec.name


# vllm_backend's own boundaries (protocol of its release 25.12); ours may lie between and below.
VLLM_BACKEND_BUCKETS = {
    "vllm:time_to_first_token_seconds": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 "
    "2.5 5 7.5 10",
    "vllm:time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 "
    "2.5",
    "vllm:e2e_request_latency_seconds": "1 2.5 5 10 15 20 30 40 50 60",
    "vllm:request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000",
    "vllm:request_generation_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000",
    "vllm:request_params_n": "1 2 5 10 20",
}


@pytest.mark.parametrize("name", sorted(VLLM_BACKEND_BUCKETS))
def test_buckets_hold_those_of_vllm_backend(name: str) -> None:
    (spec,) = [spec for spec in vllm.SPECS if spec.name == name]
    assert set(map(float, VLLM_BACKEND_BUCKETS[name].split())) <= set(spec.buckets)


def test_every_family_can_be_made_and_shows_zero_from_the_start() -> None:
    sink, _ = book()
    scrape = sink.scrape()
    shown_later = {own.REFUSED, own.TENANT_PROMPT, own.TENANT_OUTPUT, vllm.CACHE_CONFIG}
    for spec in ALL:
        if spec not in shown_later:
            assert set(spec.exposed()) <= scrape.names, spec.name
    assert scrape.by_label(vllm.SUCCESS.name, "finished_reason") == dict.fromkeys(
        ("stop", "length", "abort", "error"), 0.0
    )


def test_counters_add_up_and_travel_once_per_push() -> None:
    tokens = counter("chairlift:tokens_total", "")
    sink, metrics = book(tokens)
    for _ in range(1000):
        metrics.count(tokens, 1)
    metrics.push()
    assert (sink.scrape().value(tokens.name), sink.num_calls) == (1000.0, 1)
    metrics.push()
    assert sink.num_calls == 1


def test_gauges_travel_when_they_change() -> None:
    level = gauge("chairlift:level", "")
    sink, metrics = book(level)
    for value in (3, 3, 0, 0):
        metrics.set(level, value)
        metrics.push()
    assert (sink.scrape().value(level.name), sink.num_calls) == (0.0, 2)


def test_h3_negative_increments_are_dropped() -> None:
    total = counter("chairlift:total", "")
    sink, metrics = book(total)
    for amount in (5, -3, 0, -100):
        metrics.count(total, amount)
        metrics.push()
    assert sink.scrape().value(total.name) == 5.0


def test_a_failing_series_is_given_up_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = counter("chairlift:good_total", ""), counter("chairlift:bad_total", "")
    sink = FakeSink()
    sink.broken = {bad.name}
    metrics = MetricBook(sink, LABELS, (good, bad))
    for _ in range(3):
        metrics.count(bad, 1)
        metrics.count(good, 1)
        metrics.push()
    assert sink.scrape().value(good.name) == 3.0
    assert [r.getMessage() for r in caplog.records] == [f"metric {bad.name} failed and is given up"]


@given(st.lists(st.lists(st.floats(0, 5, allow_nan=False)), max_size=5))
def test_bucket_counters_show_what_a_histogram_shows(rounds: list[list[float]]) -> None:
    spec = histogram("x_seconds", "", (0.0005, 0.5, 1.0, 4.0))
    native_sink, counter_sink = FakeSink(), FakeSink()
    native = NativeHistogram(native_sink, spec, LABELS)
    counters = BucketCounters(counter_sink, spec, LABELS)
    for values in rounds:
        native.observe_all(values)
        counters.observe_all(values)
    shown, expected = counter_sink.scrape(), native_sink.scrape()
    assert shown.buckets(spec.name) == expected.buckets(spec.name)
    assert shown.value("x_seconds_count") == expected.value("x_seconds_count")
    assert math.isclose(shown.value("x_seconds_sum"), expected.value("x_seconds_sum"))


def test_a_value_on_a_bound_belongs_to_its_bucket() -> None:
    spec = histogram("x", "", (1.0, 2.0), dense=True)
    sink, metrics = book(spec)
    metrics.observe(spec, [1.0])
    metrics.push()
    assert sink.scrape().buckets("x") == {1.0: 1.0, 2.0: 1.0, math.inf: 1.0}


def test_dense_histograms_cost_no_call_per_value() -> None:
    spec = histogram("x", "", (1.0, 2.0), dense=True)
    sink, metrics = book(spec)
    metrics.observe(spec, [0.5] * 10_000)
    metrics.push()
    assert sink.num_calls == 5
    assert sink.scrape().value("x_count") == 10_000


def test_servers_without_histograms_show_the_same_series() -> None:
    specs = (vllm.FIRST_TOKEN, trtllm.INPUT_LENGTH)
    shown = []
    for has_histograms in (True, False):
        sink, metrics = book(*specs, has_histograms=has_histograms)
        for spec in specs:
            metrics.observe(spec, [0.003, 42.0])
        metrics.push()
        shown.append({(s, le): n for s in specs for le, n in sink.scrape().buckets(s.name).items()})
    assert shown[0] == shown[1]


def test_info_is_one_series_that_says_all_in_its_labels() -> None:
    sink, metrics = book(vllm.CACHE_CONFIG)
    metrics.info(vllm.CACHE_CONFIG, {"block_size": "16", "cache_dtype": "auto"})
    metrics.push()
    assert sink.scrape().by_label("vllm:cache_config_info", "block_size") == {"16": 1.0}
