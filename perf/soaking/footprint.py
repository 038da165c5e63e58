"""What a server holds at a moment: memory by process, files, threads, shared memory, KV blocks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import psutil

from chairlift_client.scrape import scrape
from chairlift_client.trial import TrialServer


class ServerEnded(Exception):
    """The supervisor has no tritonserver at the moment."""


class Footprint(NamedTuple):
    """Bytes unless said otherwise; ``at`` in seconds since the start."""

    at: float
    server: int
    stubs: int
    supervisor: int
    shared: int
    files: int
    threads: int
    open_requests: int
    blocks_used: int
    blocks_cached: int


def measure(server: TrialServer, start: float) -> Footprint:
    """Raises ServerEnded or psutil.NoSuchProcess where a process is gone, which none should be."""
    supervisor = psutil.Process(server.pid)
    servers = [p for p in supervisor.children(recursive=True) if p.name() == "tritonserver"]
    if not servers:
        raise ServerEnded("tritonserver has ended")
    triton = servers[0]
    stubs = [p for p in triton.children(recursive=True) if "stub" in p.name()]
    regions = Path("/dev/shm").glob(f"chairlift-{server.pid}-*")
    now = scrape(server.metrics_url, "llm")
    return Footprint(
        time.monotonic() - start,
        triton.memory_info().rss,
        sum(stub.memory_info().rss for stub in stubs),
        supervisor.memory_info().rss,
        sum(region.stat().st_blocks * 512 for region in regions),
        triton.num_fds() + sum(stub.num_fds() for stub in stubs),
        triton.num_threads() + sum(stub.num_threads() for stub in stubs),
        int(now.value("chairlift:requests_open")),
        int(now.value("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")),
        int(now.value("chairlift:kv_blocks_cached")),
    )
