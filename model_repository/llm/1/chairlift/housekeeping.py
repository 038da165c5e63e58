"""The housekeeping thread: cancellation, deadlines, drain, heartbeat, metrics, log lines.

It never stands in a step's way.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .client_watch import ClientWatch
from .config import EngineConfig
from .engine import Engine, State
from .open_requests import OpenRequests
from .profiling import StepProfiler
from .telemetry import Telemetry
from .trace import TraceOrders

logger = logging.getLogger(__name__)


class Housekeeping:
    """Looks around every ``cancellation_check_period_ms``.

    ``control_dir`` is shared with the supervisor: a file ``drain`` (seconds, as text) starts the
    drain, and ``heartbeat`` says that the engine's loop is turning.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: Engine,
        open_requests: OpenRequests,
        clock: Callable[[], float],
        control_dir: Path | None,
        *,
        clients: ClientWatch,
        telemetry: Telemetry,
        profiler: StepProfiler,
        trace: TraceOrders,
    ) -> None:
        self._config = config
        self._engine = engine
        self._open = open_requests
        self._clock = clock
        self._control_dir = control_dir
        self._clients = clients
        self._telemetry = telemetry
        self._profiler = profiler
        self._trace = trace
        self._next_beat = clock()
        self._next_flush = clock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="chairlift-housekeeping", daemon=True
        )

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        period = self._config.cancellation_check_period_ms / 1000
        while not self._stopped.wait(period):
            try:
                self.look_around()
            except Exception:
                logger.exception("housekeeping failed; it goes on")

    def look_around(self) -> None:
        """One round; public for tests."""
        self._clients.look()
        if self._control_dir is not None:
            self._check_drain(self._control_dir)
            if self._clock() >= self._next_beat:
                self._beat()
        if self._clock() >= self._next_flush:
            self._next_flush = self._clock() + self._config.stats_check_period_ms / 1000
            self._telemetry.flush()
        self._profiler.look()
        self._trace.look()

    def _check_drain(self, control_dir: Path) -> None:
        request = control_dir / "drain"
        if self._engine.state is State.SERVING and request.exists():
            text = request.read_text().strip()
            limit = float(text) if text else self._config.drain_timeout_s
            logger.info("draining: %d requests are open, limit %.0f s", len(self._open), limit)
            self._engine.drain(limit)

    def _beat(self) -> None:
        """Write the heartbeat; its time is when the engine's loop last turned, not now."""
        self._next_beat = self._clock() + self._config.heartbeat_period_s
        if self._control_dir is None:
            return
        state = self._engine.state
        if state is State.DRAINED and len(self._open):
            state = State.DRAINING  # the last responses are still on their way out
        beat = {
            "time": time.time() - (self._clock() - self._engine.last_beat),
            "state": state.value,
            "running": self._engine.num_running,
            "waiting": self._engine.num_waiting,
            "open": len(self._open),
            "blocks_used": self._engine.num_blocks_used,
            "pid": os.getpid(),
            "steps": self._telemetry.recent_steps(),
        }
        partial = self._control_dir / f"heartbeat.{os.getpid()}"
        partial.write_text(json.dumps(beat))
        partial.replace(self._control_dir / "heartbeat")
