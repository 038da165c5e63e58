"""Compile the C++ operators once per machine and load them.

The sources need only a C++17 compiler (no torch headers), so a build takes seconds and no wheel has
to match a torch version. The library lies in the user's cache under a name that says everything it
depends on: sources, compiler, processor flags, instruction path, OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Instruction paths: "native" is the best of this machine, the others let one machine test them all.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "native": ("-march=native",),
    "avx512bf16": ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"),
    "avx2": ("-march=x86-64-v3",),
    "portable": (),
}
# No fast-math: NaN and infinity keep their meaning. GCC 12 warns about its own AVX-512 headers.
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
)
_SOURCE_DIR = Path(__file__).parent


class CpuKernelsUnavailable(RuntimeError):
    """The C++ operators cannot be built or used here; the message says why."""


def load_library(variant: str = "native") -> ctypes.CDLL:
    """Return the compiled library for `variant`, building it if this machine has not yet.

    Raises CpuKernelsUnavailable with the reason (no compiler, failed build, refused instructions).
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: one of {', '.join(VARIANTS)}")
    library = _load_once(variant)
    if library.chairlift_request_tiles() == 0:
        return library
    if variant == "native":  # the kernel refuses AMX state to this process: use vectors instead
        return load_library("avx512bf16")
    raise CpuKernelsUnavailable(f"the operating system refuses the instructions of {variant!r}")


def variants_here() -> list[str]:
    """The variants this machine's processor can run."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    needs = {"avx512bf16": "avx512_bf16", "avx2": "avx2"}
    flags = _cpu_flags().split()
    return [name for name in VARIANTS if name not in needs or (x86 and needs[name] in flags)]


def _load_once(variant: str) -> ctypes.CDLL:
    compiler = _find_compiler()
    runtime = _openmp_runtime()
    path = _cache_dir() / f"cpu-{variant}-{_fingerprint(compiler, runtime, variant)}.so"
    if not path.exists():
        _build(compiler, runtime, variant, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CpuKernelsUnavailable(f"cannot load {path}: {error}") from error


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise CpuKernelsUnavailable(
        f"no C++ compiler ({wanted or 'g++'} is not on PATH): install g++ or set CXX"
    )


def _openmp_runtime() -> Path:
    """The OpenMP library torch itself uses, so that both share one thread pool."""
    import torch  # loading it is what maps the runtime

    del torch
    names = ("libgomp", "libiomp5", "libomp")
    if Path("/proc/self/maps").exists():
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.name.startswith(names):
                return path
    raise CpuKernelsUnavailable("torch runs without an OpenMP runtime in this process")


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "chairlift"


def _sources() -> list[Path]:
    return sorted(_SOURCE_DIR.glob("*.cpp"))


def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _fingerprint(compiler: str, runtime: Path, variant: str) -> str:
    state = os.stat(compiler)
    parts = [
        *(compiler, str(state.st_size), str(state.st_mtime_ns), str(runtime)),
        *(platform.machine(), _cpu_flags(), *_FLAGS, *VARIANTS[variant]),
    ]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(_SOURCE_DIR.glob("*.h")) + _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def _build(compiler: str, runtime: Path, variant: str, target: Path) -> None:
    """Compile each source, link, and move the result into place in one step.

    Processes that build at the same time work in directories of their own; the last rename wins.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
            objects = [Path(scratch) / f"{source.stem}.o" for source in _sources()]
            compile_one = [compiler, *_FLAGS, *VARIANTS[variant], "-c"]
            commands = [
                [*compile_one, str(source), "-o", str(output)]
                for source, output in zip(_sources(), objects, strict=True)
            ]
            with ThreadPoolExecutor(len(commands)) as pool:
                list(pool.map(_run, commands))
            library = Path(scratch) / target.name
            # Not -fopenmp here: that would add a second runtime (the system's) beside torch's.
            _run([compiler, "-shared", *map(str, objects), str(runtime), "-o", str(library)])
            os.replace(library, target)
    except OSError as error:
        raise CpuKernelsUnavailable(f"cannot build in {target.parent}: {error}") from error


def _run(command: list[str]) -> None:
    # tritonserver runs Python without a locale, where text would be read as ASCII.
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if result.returncode:
        raise CpuKernelsUnavailable(f"{' '.join(command)} failed:\n{result.stderr.strip()[:2000]}")
