"""What the compiler makes of the kernels, for GPUs that need not be here.

Each check runs in a process of its own, as the interpreter replaces the compiler in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Kernels that take an index from a table to an address, with a stride or a size as the factor.
INDEXED = {
    "paged_attention_kernel", "merge_splits_kernel", "rope_cache_kernel", "kv_write_kernel",
    "block_copy_kernel", "penalties_kernel",
}  # fmt: skip


def run(*command: str) -> str:
    """Standard output of a Python process that compiles instead of interpreting."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "kernels"), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a5_every_index_meets_its_stride_in_64_bits() -> None:
    found: dict[str, Any] = json.loads(run("-m", "tests.kernels.index_widths"))
    assert found.pop("narrow_kernel")["narrow"], "the check must find what is wrong on purpose"
    assert {name: kernel["narrow"] for name, kernel in found.items() if kernel["narrow"]} == {}
    assert {name for name, kernel in found.items() if kernel["checked"]} >= INDEXED


def test_a7_no_batch_or_prompt_size_needs_a_compilation_after_warm_up() -> None:
    assert json.loads(run("-m", "tests.kernels.specialisations")) == []


def test_core_kernels_compile_without_spills_and_with_wgmma_on_sm_90() -> None:
    run("perf/compile_matrix.py", "--targets", "80,90", "--core")
