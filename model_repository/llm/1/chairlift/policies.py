"""The small decisions that make the modes differ: who may board now, and in which order.

``Batching`` is static, dynamic, or continuous; everything else in the engine is the same for the
three, so that a comparison measures the policy alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from .config import EngineConfig
from .request import Request


class QueueOrder(Protocol):
    """Waiting requests, in the order in which they should be admitted."""

    def push(self, request: Request) -> None: ...

    def push_front(self, request: Request) -> None:
        """Put a preempted request back before everybody who has not started."""

    def peek(self) -> Request | None: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FirstCome:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def push(self, request: Request) -> None:
        self._queue.append(request)

    def push_front(self, request: Request) -> None:
        self._queue.appendleft(request)

    def peek(self) -> Request | None:
        return self._queue[0] if self._queue else None

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class BatchPolicy(Protocol):
    """Says whether the first of the waiting requests may board in this step."""

    def admits(self, head: Request, num_running: int, queue: QueueOrder, now: float) -> bool: ...

    def wake_at(self, queue: QueueOrder) -> float | None:
        """When an idle engine should ask again although nothing arrives; None for never."""


class Continuous:
    """Boards and leaves at every step."""

    def admits(self, head: Request, num_running: int, queue: QueueOrder, now: float) -> bool:
        return True

    def wake_at(self, queue: QueueOrder) -> float | None:
        return None


class Dynamic:
    """Runs each batch that Triton's dynamic batcher delivered to completion.

    All requests of one ``execute`` carry the same ``batch_id``; whoever of them does not fit at once
    boards as soon as memory allows, still as part of that batch.
    """

    def __init__(self) -> None:
        self._current: int | None = None

    def admits(self, head: Request, num_running: int, queue: QueueOrder, now: float) -> bool:
        if num_running == 0:
            self._current = head.batch_id
        return head.batch_id == self._current

    def wake_at(self, queue: QueueOrder) -> float | None:
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

    def admits(self, head: Request, num_running: int, queue: QueueOrder, now: float) -> bool:
        if head.batch_id == self._current and self._current < 0:
            return True
        if num_running or (
            len(queue) < self.batch_size and now < head.arrival + self.window
        ):
            return False
        self._current -= 1
        for request in islice(queue, self.batch_size):
            request.batch_id = self._current
        return True

    def wake_at(self, queue: QueueOrder) -> float | None:
        oldest = queue.peek()
        return None if oldest is None else oldest.arrival + self.window


def make_batch_policy(config: EngineConfig) -> BatchPolicy:
    if config.batching == "static":
        return Static(config.batch_size, config.batch_window_ms / 1000)
    return Dynamic() if config.batching == "dynamic" else Continuous()
