"""Reads what the metrics show of the engine and its process, and puts the telemetry together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .assembly import Assembly
from .config import EngineConfig
from .metric_names import vllm
from .metrics import MetricBook, Sink
from .observations import Observations
from .open_requests import OpenRequests
from .request_log import RequestLog
from .telemetry import EngineFigures, EngineLimits, Telemetry

logger = logging.getLogger(__name__)


class CompileWatch:
    """Counts the Triton-lang kernels that are loaded after the warm-up: each delayed a request."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        """Listen, where Triton-lang is there at all: without a GPU it is not."""
        try:
            knobs = import_module("triton.knobs")
            knobs.runtime.kernel_load_end_hook.add(self._on_load)
        except (ImportError, AttributeError):
            logger.debug("compile events are not counted: no Triton-lang that tells of them")

    def _on_load(self, *_: Any) -> None:
        self.count += 1


class EngineReader:
    """The engine's figures of the moment, read from the outside without a lock."""

    def __init__(
        self, parts: Assembly, open_requests: OpenRequests, clock: Callable[[], float]
    ) -> None:
        self._parts = parts
        self._open = open_requests
        self._clock = clock
        self._compiled = CompileWatch()
        self._page_size = os.sysconf("SC_PAGE_SIZE")
        if parts.loaded.device.type == "cuda":
            self._compiled.start()

    def __call__(self) -> EngineFigures:
        engine, kv = self._parts.engine, self._parts.scheduler.kv
        return EngineFigures(
            state=engine.state.value,
            beat_age=self._clock() - engine.last_beat,
            num_open=len(self._open),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            blocks_used=kv.num_used,
            blocks_cached=kv.num_cached_free,
            num_preemptions=self._parts.scheduler.num_preemptions,
            num_evictions=kv.num_evictions,
            num_compiled=self._compiled.count,
            process_bytes=self._process_bytes(),
            device_bytes=self._device_bytes(),
        )

    def _process_bytes(self) -> int:
        """Resident memory; 0 where there is no /proc."""
        try:
            return int(Path("/proc/self/statm").read_text().split()[1]) * self._page_size
        except OSError:
            return 0

    def _device_bytes(self) -> int:
        device = self._parts.loaded.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def make_telemetry(
    config: EngineConfig,
    parts: Assembly,
    open_requests: OpenRequests,
    observations: Observations,
    clock: Callable[[], float],
    sink: Sink | None,
    labels: Mapping[str, str],
) -> Telemetry:
    """``sink`` is None where nobody shows metrics; ``labels`` are on every series."""
    return Telemetry(
        observations,
        EngineReader(parts, open_requests, clock),
        EngineLimits(
            config.max_num_seqs,
            parts.pool.num_usable_blocks,
            config.block_size,
            config.max_tenant_labels,
        ),
        book=_make_book(config, parts, sink, labels),
        log=RequestLog(enabled=config.log_requests, prompts=config.log_prompts),
        wall_clock=time.time,
    )


def _make_book(
    config: EngineConfig, parts: Assembly, sink: Sink | None, labels: Mapping[str, str]
) -> MetricBook | None:
    """None where metrics are off, here or in the server."""
    if sink is None or not config.report_metrics:
        return None
    try:
        book = MetricBook(sink, labels)
    except Exception as error:
        logger.info("no metrics: %s", error)
        return None
    settings = {
        "block_size": config.block_size,
        "num_gpu_blocks": parts.pool.num_usable_blocks,
        "cache_dtype": str(parts.loaded.dtype).removeprefix("torch."),
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks_override": config.num_kv_blocks,
    }
    book.info(vllm.CACHE_CONFIG, {name: str(value) for name, value in settings.items()})
    return book
