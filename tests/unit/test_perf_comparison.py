"""The arithmetic and the tables of perf/compare.py, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift_client.timings import Arrival, Trace
from perf.measuring.comparison import Comparison, load_comparison, markdown
from perf.measuring.html import from_markdown
from perf.measuring.peer_process import Run
from perf.measuring.rounds import Figures, figures, medians, ratio
from perf.measuring.workload import fresh, load_workload, num_output_tokens


def made(tokens_per_second: float, ms_per_token: float = 10.0) -> Figures:
    return Figures(1.0, tokens_per_second, 20.0, 30.0, 5.0, 9.0, ms_per_token, 2.0, 0.5, 300.0)


@pytest.fixture
def comparison() -> Comparison:
    made_up = Comparison(about={"date": "today"}, weight_bytes=200_000_000)
    made_up.bits = {"chairlift": 16, "chairlift-server": 16, "fast": 16, "slow": 16, "int8": 8}
    made_up.ours = ["chairlift", "chairlift-server"]
    made_up.bandwidth = [20e9, 19e9, 21e9]
    rates = {"chairlift": 150, "chairlift-server": 140, "fast": 100, "slow": 50, "int8": 500}
    for number, mood in enumerate((1.0, 0.5, 2.0)):
        for engine, rate in rates.items():
            made_up.note("A", engine, number, made(rate * mood))
            made_up.note("C", engine, number, made(rate, ms_per_token=1000 / rate / mood))
    made_up.failures["broken"] = "ImportError:\n no such library"
    return made_up


def test_ratios_are_taken_within_rounds(comparison: Comparison) -> None:
    found = comparison.ratio("A", "chairlift-server", "fast")
    assert found is not None
    assert found == pytest.approx((1.4, 1.4, 1.4)), "the machine's moods cancel"
    single = comparison.ratio("C", "chairlift", "fast")
    assert single is not None
    assert single.median == pytest.approx(100 / 150)


def test_the_best_peer_computes_in_16_bits_and_is_not_ours(comparison: Comparison) -> None:
    assert comparison.best_peer("A") == "fast"
    assert comparison.best_peer("C") == "fast"
    assert comparison.best_peer("Z") is None


def test_rounds_that_one_engine_missed_are_left_out() -> None:
    over, under = {0: made(10), 1: made(40)}, {1: made(20), 2: made(1)}
    found = ratio(over, under, lambda each: each.tokens_per_second)
    assert found == (2.0, 2.0, 2.0)
    assert ratio({0: made(1)}, {1: made(1)}, lambda each: each.tokens_per_second) is None
    assert medians([made(1), made(5), made(3)]).tokens_per_second == 3


def test_the_tables_show_failures_floor_and_aims(comparison: Comparison) -> None:
    text = markdown(comparison)
    assert "the floor of a token is 10.00 ms" in text
    assert "| A: chairlift-server / fast, tok/s | 1.40 (1.40-1.40) | at least 1.25 |" in text
    assert "| A: chairlift-server / engine alone, tok/s | 0.93" in text
    assert "- **broken**: ImportError: no such library" in text
    assert "| int8 | 8 | 500 (250-1000) |" in text


def test_results_survive_the_disk(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "compare.json")
    assert load_comparison(tmp_path / "compare.json") == comparison
    assert (tmp_path / "compare.md").read_text() == markdown(comparison)


def test_figures_come_from_traces() -> None:
    traces = [
        Trace(0.0, 5, [Arrival(0.1, 1), Arrival(0.2, 1), Arrival(0.4, 1)]),
        Trace(0.0, 5, [Arrival(0.3, 1)]),
    ]
    run = Run(traces, [[], []], ["", ""], 3.0, 0.25, 2**21)
    found = figures(run)
    assert found.seconds == pytest.approx(0.4)
    assert found.tokens_per_second == pytest.approx(10.0)
    assert found.ms_per_token == pytest.approx(150.0)
    assert found.ttft_p50_ms == pytest.approx(200.0)
    assert (found.cpu_seconds, found.driver_cpu_seconds, found.peak_rss_mib) == (3.0, 0.25, 2.0)


def test_markdown_becomes_html_with_everything_escaped() -> None:
    text = "# A & B\n\n- one\n- **two**\n\n| a | b |\n|---|---|\n| 1 | <x> |\n\nlast\nlines"
    assert from_markdown(text) == (
        "<h2>A &amp; B</h2>\n<ul><li>one</li><li><b>two</b></li></ul>\n<table>\n"
        "<tr><th>a</th><th>b</th></tr>\n<tr><td>1</td><td>&lt;x&gt;</td></tr>\n</table>\n"
        "<p>last lines</p>"
    )


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens"),
    [("A", 64, 9629, 5590), ("B", 32, 7424, 1024), ("C", 1, 64, 128), ("D", 8, 12000, 256)],
)
def test_the_workloads_are_the_ones_that_claims_are_about(
    name: str, requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    workload = load_workload(name)
    assert len(workload) == requests
    assert sum(len(each.prompt_ids) for each in workload) == prompt_tokens
    assert num_output_tokens(workload) == output_tokens


def test_a_fresh_copy_shares_prefixes_within_itself_only() -> None:
    workload = load_workload("B")
    first, second = fresh(workload, 1), fresh(workload, 2)
    prefixes = {tuple(each.prompt_ids[:200]) for each in first}
    assert len(prefixes) == 1
    assert prefixes.isdisjoint({tuple(each.prompt_ids[:200]) for each in second})
    assert first[0].prompt_ids[0] != second[0].prompt_ids[0]
    assert [len(each.prompt_ids) for each in first] == [len(each.prompt_ids) for each in workload]
