"""Reading Prometheus's text format, rates, quantiles, and the live view made of them."""

from __future__ import annotations

import math
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chairlift_client.control import Step
from chairlift_client.scrape import Interval, Scrape, parse
from chairlift_client.top import view
from tests.unit.metrics_harness import FakeSink

TEXT = r"""# HELP a help
# TYPE a counter
a{model="llm",reason="x"} 3
a{model="llm",reason="y"} 4.5
a{model="other",reason="x"} 100
b 1e3
c{model="llm",text="quote \" back \\ line \n end, {x=\"1\"}"} NaN
h_bucket{model="llm",le="1"} 1
h_bucket{model="llm",le="2"} 3
h_bucket{model="llm",le="+Inf"} 4
"""


def test_samples_labels_and_escapes() -> None:
    samples = parse(TEXT)
    assert len(samples) == 8
    assert samples[4].labels["text"] == 'quote " back \\ line \n end, {x="1"}'
    assert math.isnan(samples[4].value)


def test_a_line_that_is_no_sample_is_named() -> None:
    with pytest.raises(ValueError, match="no sample here"):
        parse("a 1\nno sample here either\n")


def test_a_scrape_sees_its_model_and_what_has_none() -> None:
    scrape = Scrape(TEXT, 0.0, "llm")
    assert scrape.value("a") == 7.5
    assert scrape.value("a", reason="x") == 3
    assert scrape.value("b") == 1000
    assert scrape.value("nothing") == 0
    assert scrape.by_label("a", "reason") == {"x": 3, "y": 4.5}


def interval(before: str, after: str, seconds: float = 2.0) -> Interval:
    return Interval(Scrape(before, 10.0, "llm"), Scrape(after, 10.0 + seconds, "llm"))


def test_rates_and_a_counter_that_began_anew() -> None:
    assert interval("a 4\n", "a 10\n").rate("a") == 3.0
    assert interval("a 4\n", "a 2\n").growth("a") == 2.0
    assert interval("", "a 2\n").growth("a") == 2.0


def test_quantiles_lie_on_lines_within_buckets() -> None:
    seen = interval("", TEXT)
    assert seen.quantile("h", 0.25) == 1.0
    assert seen.quantile("h", 0.5) == 1.5
    assert seen.quantile("h", 0.99) == 2.0
    assert interval(TEXT, TEXT).quantile("h", 0.5) is None


@given(st.lists(st.floats(0, 9, allow_nan=False), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = [1.0, 2.0, 3.0, 5.0, 10.0]
    lines = [f'h_bucket{{le="{b:g}"}} {sum(v <= b for v in values)}' for b in bounds]
    found = interval("", "\n".join([*lines, f'h_bucket{{le="+Inf"}} {len(values)}'])).quantile(
        "h", share
    )
    true = sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]
    bucket = next(i for i, bound in enumerate(bounds) if true <= bound)
    assert found is not None
    assert (bounds[bucket - 1] if bucket else 0.0) <= found <= bounds[bucket]


def test_the_view_shows_load_traffic_latencies_and_steps() -> None:
    before = """vllm:generation_tokens_total{model="llm"} 0
vllm:time_to_first_token_seconds_bucket{model="llm",le="1"} 0
vllm:time_to_first_token_seconds_bucket{model="llm",le="+Inf"} 0
"""
    after = """vllm:generation_tokens_total{model="llm"} 246
vllm:num_requests_running{model="llm"} 3
nv_trt_llm_request_metrics{model="llm",request_type="max"} 12
vllm:kv_cache_usage_perc{model="llm"} 0.25
vllm:num_requests_waiting{model="llm"} 5
nv_inference_pending_request_count{model="llm"} 7
vllm:request_success_total{model="llm",finished_reason="stop"} 3
chairlift:engine_state{model="llm",state="serving"} 1
chairlift:tenant_generation_tokens_total{model="llm",tenant="acme"} 20
vllm:time_to_first_token_seconds_bucket{model="llm",le="1"} 4
vllm:time_to_first_token_seconds_bucket{model="llm",le="+Inf"} 4
"""
    console = Console(width=120, record=True, file=StringIO())
    console.print(view(interval(before, after), [Step(3, 64, 21.5)]))
    text = console.export_text()
    for words in (
        "serving",
        "3/12",
        "25%",
        "5 in the engine, 7 in Triton's queue",
        "123.0 tokens/s",
        "1.50/s",
        "tenant acme",
        "500.0 ms",
        "64",
        "21.5",
    ):
        assert words in text, (words, text)


def test_the_view_stands_a_server_without_an_engine() -> None:
    console = Console(width=120, record=True, file=StringIO())
    console.print(view(interval("", ""), []))
    assert "no engine" in console.export_text()


def test_the_view_asks_only_for_metrics_that_exist() -> None:
    """Each name the view reads is one that the engine exports, or Triton does itself."""
    from chairlift.metric_names import ALL
    from chairlift.metrics import MetricBook

    asked: set[str] = set()

    class Listening(Scrape):
        def value(self, name: str, **labels: str) -> float:
            asked.add(name)
            return super().value(name, **labels)

        def by_label(self, name: str, label: str) -> dict[str, float]:
            asked.add(name)
            return super().by_label(name, label)

    sink = FakeSink()
    MetricBook(sink, {"model": "llm"}, ALL)
    empty = Listening(sink.text(), 0.0, "llm")
    Console(file=StringIO()).print(view(Interval(empty, empty), []))
    exported = {name for spec in ALL for name in spec.exposed()}
    assert asked and asked - exported == {"nv_inference_pending_request_count"}
