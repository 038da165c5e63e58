"""Fair share between tenants: the one who has been served least goes next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from .queue_order import Rank, RankedQueue
from .request import Request
from .tenants import Tenants


class FairShare:
    """A virtual token counter per tenant (Sheng et al., Fairness in Serving Large Language Models).

    The counter grows with the prompt and output tokens that the tenant is served, divided by its
    weight, and the smallest goes first; within a tenant it is first come, first served. A tenant
    who had nothing waiting is lifted to the smallest counter of those who have, so that nobody
    saves up idle time. Tokens from the prefix cache and recomputed ones are not charged.

    Bound: what two tenants with requests waiting all the time are served, per weight, differs by at
    most 2 ((1 + A) P + R) / w, however long it goes on. P is the longest prompt, A the number of
    requests that may stand aside at once (``MAX_ASIDE``; 0 where all fit into memory), R what all
    running requests may generate (``max_num_seqs`` x the largest ``max_tokens``), w the smaller
    weight. For: a tenant is chosen only while its counter is the smallest; it is charged a prompt
    then, those of its requests that stood aside later, and R at most for those that run. So no
    counter is further ahead of another than that, and served tokens are the counters' growth.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._queues: dict[str, RankedQueue] = {}
        self._heap: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._floor = 0.0
        self._size = 0

    def rank(self, request: Request) -> Rank:
        return (request.arrival, request.uid)

    def outranks(self, newcomer: Request, waiting: Request) -> bool:
        return False

    def refresh(self) -> None:
        self._tenants.settle()

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if self._tenants.account(tenant).num_waiting == 1:
            self._lift(tenant)
        self._queues.setdefault(tenant, RankedQueue()).push(request, self.rank(request))
        self._size += 1
        if tenant not in self._in_heap:
            self._in_heap.add(tenant)
            heapq.heappush(self._heap, (self._tenants.account(tenant).served, tenant))

    def _lift(self, tenant: str) -> None:
        """To the smallest counter of those with requests waiting, or where that was last."""
        self._tenants.settle()
        smallest = self._next_tenant()
        if smallest is not None:
            self._floor = max(self._floor, self._tenants.account(smallest).served)
        account = self._tenants.account(tenant)
        account.served = max(account.served, self._floor)

    def _next_tenant(self) -> str | None:
        """The tenant served least. Counters only grow, so an old heap entry is never too late."""
        while self._heap:
            noted, tenant = self._heap[0]
            served = self._tenants.account(tenant).served
            if tenant not in self._queues:
                heapq.heappop(self._heap)
                self._in_heap.remove(tenant)
            elif served > noted:
                heapq.heapreplace(self._heap, (served, tenant))
            else:
                return tenant
        return None

    def peek(self) -> Request | None:
        tenant = self._next_tenant()
        if tenant is None:
            return None
        self._floor = max(self._floor, self._tenants.account(tenant).served)
        return self._queues[tenant].peek()

    def take(self, request: Request) -> None:
        self.discard(request)

    def discard(self, request: Request) -> bool:
        queue = self._queues.get(request.tenant)
        if queue is None or not queue.discard(request):
            return False
        self._size -= 1
        if not len(queue):
            del self._queues[request.tenant]
        return True

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())
