"""What is left of an engine's making, besides the engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engine.tiny_models import build

COUNT_THREADS = """
import os, sys, time
import torch
from chairlift.assembly import build
from chairlift.config import EngineConfig
torch.set_num_threads(4)  # has threads of its own, which stay
before = set(os.listdir("/proc/self/task"))
config = EngineConfig(model=sys.argv[1], threads=4, kv_cache_memory_bytes=1 << 20)
build(config, print, time.monotonic)
deadline = time.monotonic() + 20
while (left := set(os.listdir("/proc/self/task")) - before) and time.monotonic() < deadline:
    time.sleep(0.01)
print(len(left), "threads left")
"""


def test_no_thread_that_loaded_and_warmed_up_stays(tmp_path: Path) -> None:
    """An OpenMP team that stays makes libgomp believe that there are too few cores to spin."""
    folder = build(tmp_path, "llama", hidden_size=512, intermediate_size=2048)
    command = [sys.executable, "-c", COUNT_THREADS, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0 threads left"
