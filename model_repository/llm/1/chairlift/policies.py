"""The one small decision that makes the batching modes differ: who may board now.

Memory, sampling, kernels, and metrics are the same for the three, so that a comparison measures the
policy alone. Queue order is in queue_order.py; the batches of static and dynamic mode form in order
of arrival.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from .config import EngineConfig
from .request import Request
from .waiting_room import WaitingRoom


class BatchPolicy(Protocol):
    """Says whether the next of the waiting requests may board in this step."""

    def admits(
        self, candidate: Request, num_running: int, waiting: WaitingRoom, now: float
    ) -> bool: ...

    def wake_at(self, waiting: WaitingRoom) -> float | None:
        """When an idle engine should ask again although nothing arrives; None for never."""


class Continuous:
    """Boards and leaves at every step."""

    def admits(
        self, candidate: Request, num_running: int, waiting: WaitingRoom, now: float
    ) -> bool:
        return True

    def wake_at(self, waiting: WaitingRoom) -> float | None:
        return None


class Dynamic:
    """Runs each batch that Triton's dynamic batcher delivered to completion.

    All requests of one ``execute`` carry the same ``batch_id``. Whoever of them does not fit at
    once boards as soon as memory allows, still as part of that batch.
    """

    def __init__(self) -> None:
        self._current: int | None = None

    def admits(
        self, candidate: Request, num_running: int, waiting: WaitingRoom, now: float
    ) -> bool:
        if num_running == 0:
            self._current = candidate.batch_id
        return candidate.batch_id == self._current

    def wake_at(self, waiting: WaitingRoom) -> float | None:
        return None


class Static:
    """Batches of a fixed size: waits until one is full, or until its window (seconds) has passed.

    The window starts when the oldest waiting request arrived. Whoever comes after a batch has
    started waits for the next one. Batches made here are numbered below zero.
    """

    def __init__(self, batch_size: int, window: float) -> None:
        self.batch_size = batch_size
        self.window = window
        self._current = 0

    def admits(
        self, candidate: Request, num_running: int, waiting: WaitingRoom, now: float
    ) -> bool:
        if candidate.batch_id == self._current and self._current < 0:
            return True
        is_due = len(waiting) >= self.batch_size or now >= candidate.arrival + self.window
        if num_running or not is_due:
            return False
        self._current -= 1
        for request in islice(waiting, self.batch_size):
            request.batch_id = self._current
        return True

    def wake_at(self, waiting: WaitingRoom) -> float | None:
        oldest = waiting.candidate(0)
        return None if oldest is None else oldest.arrival + self.window


def make_batch_policy(config: EngineConfig) -> BatchPolicy:
    if config.batching == "static":
        return Static(config.batch_size, config.batch_window_ms / 1000)
    return Dynamic() if config.batching == "dynamic" else Continuous()
