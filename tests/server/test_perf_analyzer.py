"""Triton's own load generator against a real server (reported fault R2)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from chairlift_client.timings import Trace
from perf.measuring.environments import Cache, Tool
from perf.measuring.load_scenarios import ALWAYS, Level, command, input_json
from perf.measuring.profile_export import read_export
from perf.measuring.workload import WorkRequest, load_workload
from tests.server.harness import ServerProcess

RUN_SECONDS = 180.0
ATTEMPTS = 2  # once in eight runs it reported success and left its export empty
LENGTHS = (1, 7, 3, 12)


@pytest.fixture(scope="session")
def tool() -> Tool:
    return Cache().perf_analyzer()


def analyze(
    tool: Tool, server: ServerProcess, folder: Path, level: Level, *, stream: bool
) -> list[Trace]:
    inputs, export = written_inputs(folder, LENGTHS, stream=stream), folder / "export.json"
    address = f"127.0.0.1:{server.grpc_port}"
    return run(tool, command(tool.program, address, "llm", inputs, level, export), export)


def written_inputs(folder: Path, lengths: Sequence[int], *, stream: bool) -> Path:
    prompts = [each.prompt_ids[:24] for each in load_workload("A")]
    requests = [WorkRequest(prompt, n) for prompt, n in zip(prompts, lengths, strict=False)]
    path = folder / "inputs.json"
    path.write_text(input_json(requests, stream=stream))
    return path


def run(tool: Tool, line: list[str], export: Path) -> list[Trace]:
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            line, env=tool.variables, capture_output=True, text=True, timeout=RUN_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "No valid requests recorded" not in done.stdout + done.stderr
        if export.stat().st_size:
            break
    return read_export(export)


def test_r2_every_request_is_recorded_with_a_response_per_token(
    server: ServerProcess, tool: Tool, tmp_path: Path
) -> None:
    level = Level("4 at a time", ("--concurrency-range", "4"), 12)
    traces = analyze(tool, server, tmp_path, level, stream=True)
    assert len(traces) >= level.num_requests
    assert {trace.num_tokens for trace in traces} == set(LENGTHS)
    for trace in traces:
        assert trace.error is None
        assert len(trace.arrivals) <= trace.num_tokens, "a response without a token"


def test_whole_answers_are_one_response_with_all_tokens(
    server: ServerProcess, tool: Tool, tmp_path: Path
) -> None:
    level = Level("8/s", ("--request-rate-range", "8"), 12)
    traces = analyze(tool, server, tmp_path, level, stream=False)
    assert len(traces) >= level.num_requests
    assert {trace.num_tokens for trace in traces} == set(LENGTHS)
    assert all(len(trace.arrivals) == 1 for trace in traces)


def test_bursts_from_a_file_of_intervals_are_served(
    server: ServerProcess, tool: Tool, tmp_path: Path
) -> None:
    intervals = tmp_path / "intervals.txt"
    intervals.write_text("1\n1\n1\n500000\n")
    level = Level("bursts of 4", ("--request-intervals", str(intervals)), 12)
    traces = analyze(tool, server, tmp_path, level, stream=True)
    assert len(traces) >= level.num_requests
    assert all(trace.error is None for trace in traces)


def test_a_concurrency_that_rises_is_served(
    server: ServerProcess, tool: Tool, tmp_path: Path
) -> None:
    """From 1 to 5 at a time, two more whenever one has had its second response."""
    inputs, export = written_inputs(tmp_path, (12, 16), stream=True), tmp_path / "export.json"
    line = [
        *(str(tool.program), "-m", "llm", "-u", f"127.0.0.1:{server.grpc_port}", *ALWAYS),
        *("--input-data", str(inputs), "--request-parameter", "ignore_eos:true:bool"),
        *("--periodic-concurrency-range", "1:5:2", "--request-period", "2"),
        *("--profile-export-file", str(export)),
    ]
    traces = run(tool, line, export)
    assert len(traces) >= 5
    assert {trace.num_tokens for trace in traces} == {12, 16}
    assert all(trace.error is None for trace in traces)
