"""Where the checkout's parts lie, for scripts that are run from anywhere."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PERF = ROOT / "perf"
RESULTS = PERF / "results"
PEERS = PERF / "peers"
WORKLOADS = PERF / "workloads"
ENGINE = ROOT / "model_repository" / "llm" / "1"
DEFAULT_MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
