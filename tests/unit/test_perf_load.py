"""What perf_analyzer is told, and what is read from its profile export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift_client.timings import Objective, summarize
from perf.measuring.load_scenarios import (
    Level,
    burst_intervals,
    command,
    input_json,
    load_scenarios,
)
from perf.measuring.profile_export import read_export
from perf.measuring.workload import WorkRequest, load_workload

# Eight requests, two at a time, with limits of 1, 5, 3 and 2 tokens, recorded from perf_analyzer
# 2.51 against a server.
RECORDED = Path(__file__).parent / "recorded" / "perf_analyzer_export.json"


def test_r2_a_decoupled_model_is_recorded_with_a_response_per_token() -> None:
    traces = read_export(RECORDED)
    assert len(traces) == 8
    assert {trace.num_tokens for trace in traces} == {1, 2, 3, 5}
    assert all(len(trace.arrivals) == trace.num_tokens for trace in traces)
    assert all(trace.error is None for trace in traces), "also for answers of one token"


def test_a_recorded_export_gives_the_usual_figures() -> None:
    export = json.loads(RECORDED.read_text())
    requests = export["experiments"][0]["requests"]
    summary = summarize(read_export(RECORDED), Objective(ttft=1.0))
    first = min(request["timestamp"] for request in requests)
    last = max(request["response_timestamps"][-1] for request in requests)
    tokens = sum(len(request["response_timestamps"]) for request in requests)
    assert summary.duration == pytest.approx((last - first) / 1e9)
    assert summary.tokens_per_second == pytest.approx(tokens / summary.duration)
    assert (summary.num_good, summary.num_failed) == (8, 0)
    assert summary.ttft is not None and summary.itl is not None
    assert 0 < summary.itl.p50 < summary.ttft.p50 < 1


def export_of(tmp_path: Path, *requests: dict[str, Any]) -> Path:
    path = tmp_path / "export.json"
    path.write_text(json.dumps({"experiments": [{"requests": list(requests)}]}))
    return path


def request_of(asked: bool, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {
        "timestamp": 1_000_000_000,
        "request_inputs": {"return_num_output_tokens": asked},
        "response_timestamps": [1_500_000_000 + n for n in range(len(outputs))],
        "response_outputs": list(outputs),
    }


def test_coalesced_responses_count_all_their_tokens(tmp_path: Path) -> None:
    outputs = ({"text_output": "a b c", "num_output_tokens": 3}, {"num_output_tokens": 0})
    (trace,) = read_export(export_of(tmp_path, request_of(True, *outputs)))
    assert (trace.num_tokens, len(trace.arrivals), trace.ttft) == (3, 1, 0.5)


def test_a_count_that_was_not_asked_for_is_junk(tmp_path: Path) -> None:
    outputs = ({"text_output": "a", "num_output_tokens": 630027599}, {"text_output": ""})
    (trace,) = read_export(export_of(tmp_path, request_of(False, *outputs)))
    assert trace.num_tokens == 1


def test_a_refused_request_is_a_failure_and_not_a_fast_one(tmp_path: Path) -> None:
    refused = request_of(True)
    summary = summarize(read_export(export_of(tmp_path, refused)), Objective(ttft=9.0))
    assert (summary.num_failed, summary.num_good) == (1, 0)


def test_an_export_without_requests_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no request was recorded"):
        read_export(export_of(tmp_path))


def test_inputs_are_exact_and_of_one_set(tmp_path: Path) -> None:
    data = json.loads(input_json([WorkRequest([5, 6, 7], 4)], stream=False))["data"]
    assert data == [
        {
            "input_ids": {"content": [5, 6, 7], "shape": [3]},
            "max_tokens": [4],
            "temperature": [0.0],
            "stream": [False],
            "return_num_output_tokens": [True],
        }
    ]
    many = json.loads(input_json(load_workload("A"), stream=True))["data"]
    assert len({tuple(entry) for entry in many}) == 1, "Triton batches one set of inputs only"


def test_bursts_are_requests_at_once_and_a_pause() -> None:
    assert burst_intervals(3, 1.5) == "1\n1\n1500000\n"


def test_every_scenario_becomes_command_lines(tmp_path: Path) -> None:
    scenarios = load_scenarios(tmp_path)
    assert {"sweep", "rate", "bursts", "prefix", "long", "streaming", "whole"} == set(scenarios)
    for scenario in scenarios.values():
        assert load_workload(scenario.workload)
        for level in scenario.levels:
            line = command(
                Path("pa"), "127.0.0.1:1", "llm", tmp_path / "in", level, tmp_path / "out"
            )
            assert "--streaming" in line, "perf_analyzer refuses decoupled models without it"
            assert line[line.index("--request-count") + 1] == str(level.num_requests)
    rate = scenarios["rate"].levels[0]
    assert rate == Level(
        "0.5/s", ("--request-rate-range", "0.5", "--request-distribution", "poisson"), 48
    )
    assert Path(scenarios["bursts"].levels[0].arguments[1]).read_text().count("\n") == 16
