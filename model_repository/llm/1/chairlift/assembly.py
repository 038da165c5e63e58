"""Puts an engine together from its settings: model, pool, backend, sampler, scheduler, loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from . import loader, warmup
from .attention import AttentionBackend
from .attention_kernels import TritonAttention
from .backends import make_backend
from .config import EngineConfig
from .device_memory import plan_pool
from .engine import Engine
from .graphs import Capture, CudaCapture, graph_shapes
from .kv_cache import KVCacheManager
from .kv_in_flight import InFlightKVCache
from .kv_scales import read_scales
from .loader import LoadedModel
from .memory import PoolPlan, kv_bytes_per_token
from .model_runner import ModelRunner, Runner
from .policies import make_batch_policy
from .rowwise import best_token
from .sampler import Sampler
from .scheduler import Scheduler
from .step_outputs import Outputs, StepStats
from .waiting_room import make_waiting_room
from .warmup import WarmStep

logger = logging.getLogger(__name__)

# Where `execute` blocks when it is full, a small waiting room leaves whoever can't board soon in
# Triton's own queue, where its priorities, timeouts, and size limit act.
SMALL_WAITING_ROOM = 16
LARGE_WAITING_ROOM = 1024


class Assembly(NamedTuple):
    """An engine ready to start, and what the Triton side must know of it."""

    engine: Engine
    loaded: LoadedModel
    pool: PoolPlan
    scheduler: Scheduler
    max_model_len: int


def build(
    config: EngineConfig,
    emit: Callable[[Outputs], None],
    clock: Callable[[], float],
    *,
    on_step: Callable[[StepStats], None] | None = None,
    loaded: LoadedModel | None = None,
    wrap_runner: Callable[[Runner], Runner] = lambda runner: runner,
    capture: Capture | None = None,
) -> Assembly:
    """Load (unless ``loaded`` is given), size the pool, allocate it, and warm up; the loop isn't
    started. ``capture`` stands in for CUDA graphs where there is no GPU. Raises ``ValueError`` with
    the reason where that can't be done.

    Happens in a thread that ends with it and takes its OpenMP team along: a second team that lives
    makes libgomp count more threads than cores, and then the engine's own sleeps after 100 turns at
    a barrier, whatever GOMP_SPINCOUNT says: 45,000 times in a run of workload A instead of 6,000.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            _build, config, emit, clock, on_step, loaded, wrap_runner, capture
        ).result()


def _build(
    config: EngineConfig,
    emit: Callable[[Outputs], None],
    clock: Callable[[], float],
    on_step: Callable[[StepStats], None] | None,
    loaded: LoadedModel | None,
    wrap_runner: Callable[[Runner], Runner],
    capture: Capture | None,
) -> Assembly:
    if config.threads:
        torch.set_num_threads(config.threads)
    loaded = loaded or loader.load(config)
    bytes_per_token = kv_bytes_per_token(loaded.layers, _cache_dtype(config, loaded).itemsize)
    pool = plan_pool(config, loaded.device, bytes_per_token, lambda: _largest_step(config, loaded))
    backend = _backend(config, loaded, pool.num_blocks)
    runner = _runner(config, loaded, backend)
    max_model_len = min(loaded.max_model_len, pool.num_tokens)
    steps = warmup.steps_for(backend, max_model_len)
    warmup.run_steps(runner, steps, config.block_size, pool.num_blocks)
    ahead = config.one_step_ahead == "on" or (
        config.one_step_ahead == "auto" and loaded.device.type == "cuda"
    )
    books = InFlightKVCache if ahead else KVCacheManager
    if capture is None and loaded.device.type == "cuda" and loaded.kernels is not None:
        capture = CudaCapture(loaded.device)
    if capture is not None and config.cuda_graphs == "auto":
        runner.capture_graphs(capture, graph_shapes(config.max_num_seqs, max_model_len))
    kv = books(pool.num_blocks, config.block_size, prefix_caching=config.enable_prefix_caching)
    scheduler = Scheduler(config, kv, make_batch_policy(config), make_waiting_room(config, kv))
    engine = Engine(
        scheduler,
        wrap_runner(runner),
        emit,
        clock,
        max_waiting=config.max_waiting or _waiting_room(config),
        on_step=on_step,
        one_step_ahead=ahead,
    )
    logger.info(
        "KV pool: %d blocks of %d tokens (%d tokens, %.1f MiB); %d requests of %d tokens fit",
        pool.num_usable_blocks,
        pool.block_size,
        pool.num_tokens,
        pool.num_bytes / 2**20,
        pool.requests_of(max_model_len),
        max_model_len,
    )
    return Assembly(engine, loaded, pool, scheduler, max_model_len)


def _waiting_room(config: EngineConfig) -> int:
    """A static batch must find room to gather."""
    if config.when_full == "refuse":
        return LARGE_WAITING_ROOM
    return max(SMALL_WAITING_ROOM, 2 * config.batch_size if config.batching == "static" else 0)


def _largest_step(config: EngineConfig, loaded: LoadedModel) -> None:
    """A step as large as the settings allow, over a cache of its own that is gone afterwards.

    Its contexts are as long as any, for the partial sums of split attention, and it samples in
    every way that needs memory.
    """
    step = WarmStep(
        config.max_num_seqs - 1,
        config.max_num_batched_tokens - config.max_num_seqs + 1,
        context=loaded.max_model_len,
        params=warmup.SAMPLED,
    )
    backend = _backend(config, loaded, step.blocks_needed(config.block_size))
    warmup.run_steps(_runner(config, loaded, backend), [step], config.block_size)


def _backend(config: EngineConfig, loaded: LoadedModel, num_blocks: int) -> AttentionBackend:
    """With its cache."""
    backend = make_backend(loaded.kernels)
    dtype = _cache_dtype(config, loaded)
    if config.kv_cache_scales is not None and isinstance(backend, TritonAttention):
        backend.scales = read_scales(Path(config.kv_cache_scales), loaded.layers)
    backend.allocate(loaded.layers, num_blocks, config.block_size, dtype, loaded.device)
    return backend


def _cache_dtype(config: EngineConfig, loaded: LoadedModel) -> torch.dtype:
    """The model's own, or e4m3: half of bf16's bytes, three bits of mantissa, up to 448."""
    if config.kv_cache_dtype == "auto":
        return loaded.dtype
    if loaded.kernels is None or loaded.kernels.kind is not TritonAttention:
        raise ValueError("kv_cache_dtype 'fp8' needs the Triton-lang kernels, on a GPU")
    return torch.float8_e4m3fn


def _runner(config: EngineConfig, loaded: LoadedModel, backend: AttentionBackend) -> ModelRunner:
    kernels = isinstance(backend, TritonAttention)
    ops = None if loaded.kernels is None else loaded.kernels.ops
    best = getattr(ops, "best_token", best_token)
    sampler = Sampler(loaded.vocab_size, loaded.device, kernels=kernels, best_token=best)
    return ModelRunner(loaded.forward, backend, sampler, config.block_size, loaded.device)
