"""In which order waiting requests board."""

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

    def push(self, request: Request) -> None: ...

    def peek(self) -> Request | None: ...

    def pop(self) -> Request:
        """Take out the head that ``peek`` has shown."""

    def discard(self, request: Request) -> None: ...

    def first(self, number: int) -> list[Request]: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class RankedQueue:
    """Requests by rank, smallest first; a cancelled one is skipped when it comes to the head.

    ``push``, ``pop``, and ``discard`` cost O(log n) on average. Ranks end in the unique ``uid``.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []
        self._members: set[int] = set()

    def push(self, request: Request, rank: Rank) -> None:
        self._members.add(request.uid)
        heapq.heappush(self._heap, (rank, request))

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].uid not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """The head that ``peek`` has shown."""
        _, request = heapq.heappop(self._heap)
        self._members.remove(request.uid)
        return request

    def discard(self, request: Request) -> bool:
        """Take a cancelled request out; False if it is not here."""
        if request.uid not in self._members:
            return False
        self._members.remove(request.uid)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1].uid in self._members]
            heapq.heapify(self._heap)
        return True

    def first(self, number: int) -> list[Request]:
        return [request for _, request in heapq.nsmallest(number, self._live())]

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

    def push(self, request: Request) -> None:
        self._queue.push(request, self.rank(request))

    def peek(self) -> Request | None:
        return self._queue.peek()

    def pop(self) -> Request:
        return self._queue.pop()

    def discard(self, request: Request) -> None:
        self._queue.discard(request)

    def first(self, number: int) -> list[Request]:
        return self._queue.first(number)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)
