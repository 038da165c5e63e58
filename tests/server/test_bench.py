"""`chairlift bench` against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import ROOT, ServerProcess

RUN_SECONDS = 180.0


def bench(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chairlift_client", "bench", "--url", server.grpc]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={"PYTHONPATH": str(ROOT / "client"), "COLUMNS": "100"},
    )


@pytest.mark.parametrize("pace", [("--concurrency", "4"), ("--rate", "20")])
def test_bench_measures_made_up_requests(
    server: ServerProcess, tmp_path: Path, pace: tuple[str, str]
) -> None:
    out = tmp_path / "figures.json"
    limits = ("--slo-ttft", "60000", "--slo-itl", "60000")
    size = ("--requests", "8", "--prompt-tokens", "12", "--max-tokens", "6")
    done = bench(server, *pace, *limits, *size, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("time to first token", "throughput", "8 of 8 within", "8 done, 0 failed"):
        assert words in done.stdout
    figures = json.loads(out.read_text())
    assert figures["num_tokens"] == 8 * 6
    assert figures["num_prompt_tokens"] >= 8 * 12, "the server's own count"
    assert figures["num_good"] == 8
    assert 0 < figures["ttft"]["p50"] <= figures["latency"]["largest"]


def test_bench_reads_a_workload_file(server: ServerProcess, tmp_path: Path) -> None:
    path, out = tmp_path / "load.jsonl", tmp_path / "figures.json"
    entries = [
        {"prompt": "The sun is", "max_tokens": 3},
        {"prompt_token_ids": [504, 4234, 314], "max_tokens": 5},
        {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    done = bench(server, "--file", str(path), "--warmup", "0", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["num_tokens"] == 12


def test_refused_requests_are_failures_and_an_exit_code(
    server: ServerProcess, tmp_path: Path
) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n{"prompt": "a", "max_tokens": -2}\n')
    done = bench(server, "--file", str(path), "--warmup", "0")
    assert done.returncode == 1
    assert "1 done, 1 failed" in done.stdout
    assert "max_tokens" in done.stderr


def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    command = [sys.executable, "-m", "chairlift_client", "bench", "--url", "grpc://127.0.0.1:9"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env={"PYTHONPATH": str(ROOT / "client")},
    )
    assert done.returncode == 1
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
