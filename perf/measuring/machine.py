"""What the figures were measured on: machine, versions, commit, and how fast memory can be read."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import re
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from .paths import ROOT

READ_PASSES = 9
READ_UNIT = 256  # bytes of a turn of read_memory.c


def describe_machine() -> dict[str, object]:
    """CPU, cores, memory and system, without names or addresses of the machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)$", cpuinfo, re.M)
    flags = re.search(r"^flags\s*: (.*)$", cpuinfo, re.M)
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
    present = set(flags[1].split()) if flags else set()
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "features": [name for name in known if name in present],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def describe_commit() -> str:
    """The commit, with a mark where tracked files differ from it; "unknown" without git."""
    if shutil.which("git") is None:
        return "unknown"
    head = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def versions(packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of those packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    return done.stdout.strip()


def weight_bytes(model_dir: Path) -> int:
    """Bytes of all tensors in a folder's safetensors files; tied weights are stored once.

    A decode step reads each weight once, an untied embedding aside, of which it reads single rows.
    """
    total = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                total += end - begin
    return total


def read_bandwidth(num_bytes: int, threads: int) -> float:
    """Bytes per second at which ``threads`` read a buffer of this size over and over: the best.

    A floor has to be what the machine can do, so the reader (read_memory.c) fetches ahead and its
    memory is on 2 MB pages where the system gives them: torch's sum over small pages reads 21 GB/s
    where this reads 34. ctypes lets go of the interpreter lock meanwhile.
    """
    share = num_bytes // threads // READ_UNIT * READ_UNIT
    buffers = [_large_pages(share) for _ in range(threads)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, share)  # untouched pages would all be one page of zeros
    rates = []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        read = _reader(Path(folder))
        for _ in range(READ_PASSES):
            start = time.perf_counter()
            list(pool.map(lambda buffer: read(buffer, share), buffers))
            rates.append(share * threads / (time.perf_counter() - start))
    return max(rates)


def _reader(folder: Path) -> Callable[[ctypes.Array[ctypes.c_char], int], int]:
    library = folder / "read_memory.so"
    source = Path(__file__).with_name("read_memory.c")
    subprocess.run(
        ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True
    )
    function = ctypes.CDLL(str(library)).read_memory
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return function


def _large_pages(num_bytes: int) -> ctypes.Array[ctypes.c_char]:
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_char * num_bytes).from_buffer(memory)
