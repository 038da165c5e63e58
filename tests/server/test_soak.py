"""Two minutes of clients of all kinds (CHAIRLIFT_SOAK_SECONDS for more): nothing grows or fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import ROOT

SECONDS = float(os.environ.get("CHAIRLIFT_SOAK_SECONDS", "120"))


@pytest.mark.slow
def test_a_soak_finds_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    command = [sys.executable, str(ROOT / "perf/soak.py"), "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--clients", "6", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".png"}
