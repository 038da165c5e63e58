"""In which order waiting requests board: first come, by priority, fair, or by cached prefix."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from .request import Request

Rank = tuple[float, ...]


class QueueOrder(Protocol):
    """Waiting requests that have not been at the head yet, and how requests compare."""

    def rank(self, request: Request) -> Rank:
        """Smaller boards first and is preempted last."""

    def outranks(self, newcomer: Request, waiting: Request) -> bool:
        """Whether ``newcomer`` may go first although ``waiting`` has been at the head before."""

    def refresh(self) -> None:
        """Called once per step before the first ``peek``, if there is room for anybody."""

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None: ...

    def take(self, request: Request) -> None:
        """``request``, which ``peek`` has shown, boards."""

    def discard(self, request: Request) -> bool:
        """Take ``request`` out without that it boards; False if it is not here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class RankedQueue:
    """Requests by rank, smallest first; who is taken out is skipped when it comes to the head.

    ``push`` and ``discard`` cost O(log n) on average. Ranks end in the unique ``uid``.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._members: set[int] = set()

    def push(self, request: Request, rank: Rank) -> None:
        if request.uid not in self._members:
            self._members.add(request.uid)
            heapq.heappush(self._heap, (rank, request))

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].uid not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def discard(self, request: Request) -> bool:
        if request.uid not in self._members:
            return False
        self._members.remove(request.uid)
        if self._heap[0][1] is request:
            heapq.heappop(self._heap)
        elif len(self._heap) > 2 * len(self._members) + 16:
            self._heap = list(self._live())
            heapq.heapify(self._heap)
        return True

    def _live(self) -> Iterator[tuple[Rank, Request]]:
        return (entry for entry in self._heap if entry[1].uid in self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._live()))


class FirstCome:
    """First come, first served."""

    def __init__(self) -> None:
        self._queue = RankedQueue()

    def rank(self, request: Request) -> Rank:
        return (request.arrival, request.uid)

    def outranks(self, newcomer: Request, waiting: Request) -> bool:
        return False

    def refresh(self) -> None:
        """Arrival times don't change."""

    def push(self, request: Request) -> None:
        self._queue.push(request, self.rank(request))

    def peek(self) -> Request | None:
        return self._queue.peek()

    def take(self, request: Request) -> None:
        self._queue.discard(request)

    def discard(self, request: Request) -> bool:
        return self._queue.discard(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class Priority(FirstCome):
    """The highest priority first, 1 as in Triton; 0 is Triton's "not given" and means the default.

    A level is worth ``aging_s`` seconds of waiting, so whoever waits long enough goes before those
    who came later with a higher priority. Waiting lifts all at the same pace, so arrival and level
    give a rank that never changes. Without aging (0) priority is strict.
    """

    def __init__(self, default_level: int, aging_s: float) -> None:
        super().__init__()
        self._default_level = default_level
        self._aging_s = aging_s

    def rank(self, request: Request) -> Rank:
        level = request.priority or self._default_level
        if self._aging_s:
            return (request.arrival + level * self._aging_s, request.uid)
        return (level, request.arrival, request.uid)

    def outranks(self, newcomer: Request, waiting: Request) -> bool:
        return self.rank(newcomer) < self.rank(waiting)
