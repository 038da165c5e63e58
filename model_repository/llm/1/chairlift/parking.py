"""The limit on a tenant's requests in the engine: who is beyond it waits outside the queue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from .queue_order import Rank, RankedQueue
from .request import Request


class Parking:
    """Of each tenant ``limit`` sequences are in the queue or running, the others are parked here.

    Whoever leaves lets one in, so nobody in the queue is ever held back by the limit, and the limit
    costs a step nothing. Forks are not held back; they count.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._entered: dict[str, int] = {}
        self._parked: dict[str, RankedQueue] = {}
        self._size = 0

    def admits(self, request: Request, rank: Rank) -> bool:
        """Whether ``request`` may enter the queue now; if not, it is parked."""
        if self._has_room(request.tenant):
            self._enter(request.tenant)
            return True
        self._parked.setdefault(request.tenant, RankedQueue()).push(request, rank)
        self._size += 1
        return False

    def forked(self, tenant: str) -> None:
        self._enter(tenant)

    def _enter(self, tenant: str) -> None:
        self._entered[tenant] = self._entered.get(tenant, 0) + 1

    def left(self, tenant: str) -> Request | None:
        """One of the tenant's has left the queue or the engine; returns who may enter for it."""
        self._entered[tenant] -= 1
        if not self._entered[tenant]:
            del self._entered[tenant]
        parked = self._parked.get(tenant)
        request = None if parked is None else parked.peek()
        if request is None or not self._has_room(tenant):
            return None
        self.discard(request)
        self._enter(tenant)
        return request

    def _has_room(self, tenant: str) -> bool:
        return self._limit is None or self._entered.get(tenant, 0) < self._limit

    def discard(self, request: Request) -> bool:
        """Take ``request`` out; False if it is not here."""
        parked = self._parked.get(request.tenant)
        if parked is None or not parked.discard(request):
            return False
        self._size -= 1
        if not len(parked):
            del self._parked[request.tenant]
        return True

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._parked.values())
