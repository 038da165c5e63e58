"""Building, caching and loading the CPU operators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chairlift_kernels.cpu import CpuKernelsUnavailable, CpuOps, load_library

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty build cache for this test and the processes it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(KERNELS))
    return tmp_path / "chairlift"


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_build_at_once_all_get_the_library(cache: Path) -> None:
    code = "from chairlift_kernels.cpu import CpuOps; print(CpuOps().instructions)"
    processes = [start(code) for _ in range(3)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert {out.strip() for out, _ in results} == {CpuOps().instructions}
    assert len(list(cache.iterdir())) == 1  # one library, no scratch directories


def test_a_built_library_is_not_built_again(cache: Path) -> None:
    load_library()
    (library,) = cache.iterdir()
    before = library.stat()
    load_library()
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CpuKernelsUnavailable, match="no-such-compiler is not on PATH"):
        CpuOps()


def test_a_failed_build_says_what_failed_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(CpuKernelsUnavailable, match="out of ideas"):
        CpuOps()
    assert list(cache.iterdir()) == []


def test_a_compiler_that_quotes_beyond_ascii_is_heard_without_a_locale(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So it is in tritonserver's stub."""
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'out of ‘ideas’' >&2\nexit 1\n", encoding="utf-8")
    compiler.chmod(0o755)
    for name, value in {"CXX": str(compiler), "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PYTHONCOERCECLOCALE", "PYTHONUTF8"):
        monkeypatch.setenv(name, "0")
    _, errors = start("from chairlift_kernels.cpu import CpuOps; CpuOps()").communicate()
    assert "CpuKernelsUnavailable" in errors and "out of" in errors


def test_an_unwritable_cache_is_unavailable_not_a_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.raises(CpuKernelsUnavailable, match="cannot build in"):
        CpuOps()


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown variant 'sse9'"):
        CpuOps("sse9")


def test_the_library_shares_the_one_openmp_runtime_of_torch() -> None:
    code = """
import torch
from chairlift_kernels.cpu import CpuOps
ops = CpuOps()
x = torch.randn(64, 64).bfloat16()
ops.linear(x, ops.pack_linear(x))
lines = open("/proc/self/maps").read().splitlines()
paths = {line.split()[-1] for line in lines if "/" in line}
names = ("libgomp", "libiomp5", "libomp")
print(*(p for p in paths if p.rsplit("/", 1)[-1].startswith(names)), sep="\\n")
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(KERNELS), "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
    )
    assert len(process.stdout.split()) == 1, process.stdout
