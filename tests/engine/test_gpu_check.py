"""The measurements for a GPU machine, tried where there is none: every script runs to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "perf/gpu_check.sh"
# Titles that a whole run writes, by the file they are in.
TITLES = {
    "gpu-kernels": {
        "Ceilings", "Cache beyond 2^31 elements", "Decode attention", "Prefill attention",
        "Norm, activation, rotation", "Sampling", "Launch shapes",
    },
    "gpu-end-to-end": {"Ceilings", "Batching", "Switches", "Decode step of an 8B shape"},
}  # fmt: skip


@pytest.mark.slow
def test_the_scripts_run_and_write_their_tables(tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, "--smoke", tmp_path],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, titles in TITLES.items():
        written = json.loads((tmp_path / f"{name}.json").read_text())
        assert {table["title"] for table in written["tables"]} == titles
        assert all(table["rows"] for table in written["tables"])
        text = (tmp_path / f"{name}.md").read_text()
        assert all(f"## {title}" in text for title in titles)


def test_the_steps_fit_into_ten_minutes_and_name_tests_that_exist() -> None:
    text = SCRIPT.read_text()
    limits = [int(limit) for limit in re.findall(r"^ *step \S+ (\d+) ", text, re.MULTILINE)]
    assert len(limits) == 3 and sum(limits) <= 600 - 30  # what starting Python three times takes
    for path in ("attention", "layer", "sampling"):
        assert (ROOT / f"tests/kernels/test_triton_{path}.py").exists()
    assert (ROOT / "tests/engine/test_triton_backend.py").exists()
