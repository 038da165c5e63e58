"""What a device really has: memory in total, available now, and taken by one largest step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from .config import EngineConfig
from .memory import PoolPlan, cpu_pool_bytes, gpu_pool_bytes, size_pool

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")


def available_cpu_bytes() -> int:
    """Memory this process may still take: the machine's, or the container's if that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = CGROUP_LIMIT.read_text().strip()
        usage = int(CGROUP_USAGE.read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, int(limit) - usage)


def plan_pool(
    config: EngineConfig,
    device: torch.device,
    bytes_per_token: int,
    run_largest_step: Callable[[], None],
) -> PoolPlan:
    """Size the KV pool from what the device has, after the weights are loaded.

    ``run_largest_step`` runs a step of ``max_num_batched_tokens`` over a small cache of its own;
    its peak is what steps need beside the pool. Raises ``ValueError`` with the numbers where
    nothing fits.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run_largest_step()
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        available = gpu_pool_bytes(total, free, own, peak, config.gpu_memory_utilization)
        if config.kv_cache_memory_bytes is not None:
            available = min(available, config.kv_cache_memory_bytes)
    else:
        available = cpu_pool_bytes(available_cpu_bytes(), config.kv_cache_memory_bytes)
    wanted = config.num_kv_blocks
    if wanted is None and config.max_tokens_in_kv_cache is not None:
        capped = config.max_tokens_in_kv_cache // config.block_size
        fitting = size_pool(available, bytes_per_token, config.block_size, None)
        wanted = max(1, min(capped, fitting.num_usable_blocks))
    return size_pool(available, bytes_per_token, config.block_size, wanted)
