"""genai-perf, over the perf_analyzer that it runs, against a real server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perf.measuring.environments import Cache, Tool
from tests.server.client_env import client_python
from tests.server.harness import ROOT, ServerProcess
from tests.server.talk import wait_drained

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
REQUESTS, PROMPT_TOKENS, TOKENS = 6, 8, 4
ATTEMPTS = 2  # perf_analyzer now and then reports success and leaves its export empty


@pytest.fixture(scope="module")
def tool() -> Tool:
    return Cache().perf_analyzer()


def profile(tool: Tool, folder: Path, *arguments: str) -> Any:
    """The report of a run with few requests of equal lengths."""
    python = client_python("genai-perf")
    search = os.pathsep.join([str(python.parent), str(tool.program.parent), os.environ["PATH"]])
    command = [
        *(str(python.with_name("genai-perf")), "profile", *arguments, "--tokenizer", str(MODEL)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS)),
        *("--output-tokens-mean", str(TOKENS)),
        *("--num-dataset-entries", "4", "--request-count", str(REQUESTS), "--concurrency", "2"),
        *("--artifact-dir", str(folder), "--profile-export-file", "export.json"),
    ]
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command,
            env={**tool.variables, "PATH": search, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
        )
        if any(export.stat().st_size for export in folder.rglob("export.json")):
            break
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = folder.rglob("export_genai_perf.json")
    return json.loads(report.read_text())


def check_counts(report: Any) -> None:
    assert report["request_count"]["avg"] == REQUESTS
    lengths = {"input_sequence_length": PROMPT_TOKENS, "output_sequence_length": TOKENS}
    for name, length in lengths.items():
        assert report[name]["min"] == report[name]["max"] == length, name
    assert report["output_token_throughput"]["avg"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "model"), [("vllm", "vllm_model"), ("tensorrtllm", "llm")])
def test_genai_perf_counts_every_token_of_every_request(
    server: ServerProcess, tool: Tool, tmp_path: Path, backend: str, model: str
) -> None:
    address = f"127.0.0.1:{server.grpc_port}"
    mode = ("--endpoint-type", "kserve", "--backend", backend, "--streaming")
    exactly = "--output-tokens-mean-deterministic"
    report = profile(tool, tmp_path, "--model", model, "--url", address, *mode, exactly)
    check_counts(report)
    assert 0 < report["time_to_first_token"]["min"] < report["request_latency"]["max"]
    wait_drained(server)


@pytest.mark.slow
def test_genai_perf_over_http_generate(server: ServerProcess, tool: Tool, tmp_path: Path) -> None:
    options = ("--model", "llm", "--url", server.http, "--endpoint-type", "generate")
    check_counts(profile(tool, tmp_path, *options, "--extra-inputs", "ignore_eos:true"))
    wait_drained(server)
