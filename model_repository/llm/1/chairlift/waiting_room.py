"""Everybody without a seat: who may try to board next, and who may pass whom."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain

from .config import EngineConfig
from .fair_share import FairShare
from .kv_cache import KVCacheManager
from .parking import Parking
from .prefix_match import PrefixMatch
from .queue_order import FirstCome, Priority, QueueOrder
from .request import Request
from .tenants import Tenants

# Requests that may stand aside at once because they don't fit. Each is looked at again whenever
# memory is freed, so this bounds the cost of a step; the queue behind them is never searched.
MAX_ASIDE = 8


class WaitingRoom:
    """The queue in its order, before it the *front*, behind it those whom a tenant's limit parks.

    The front holds who has been at the queue's head already: preempted requests and forks without a
    seat, whom nobody behind may pass, and requests set aside because they do not fit into memory.
    Smaller ones pass such a request ``max_overtakes`` times, then nobody does, and what leaves
    makes room for it.
    """

    def __init__(
        self, order: QueueOrder, tenants: Tenants, parking: Parking, max_overtakes: int
    ) -> None:
        self.order = order
        self._tenants = tenants
        self._parking = parking
        self._max_overtakes = max_overtakes
        self._front: list[Request] = []

    # ---------------------------------------------------------------- in

    def add(self, request: Request) -> None:
        """Raises ``RequestError`` where the tenant has too much waiting already."""
        self._tenants.enter(request)
        if self._parking.admits(request, self.order.rank(request)):
            self.order.push(request)

    def put_back(self, request: Request) -> None:
        """Return a request that has started: it waits before everybody of a later rank."""
        insort(self._front, request, key=self.order.rank)

    # ---------------------------------------------------------------- who is next

    def refresh(self) -> None:
        """Called once per step before the first ``candidate``."""
        self.order.refresh()

    def candidate(self, position: int) -> Request | None:
        """Who may try to board after ``position`` others have tried without success."""
        if any(r.num_overtaken >= self._max_overtakes for r in self._front[:position]):
            return None  # they have been passed often enough, the last time in this step
        head = self.order.peek()
        if position == len(self._front):
            return head
        waiting = self._front[position]
        return head if head is not None and self.order.outranks(head, waiting) else waiting

    def set_aside(self, request: Request) -> bool:
        """The candidate doesn't fit: keep its place, and say whether the next one may try."""
        if request.first_scheduled is not None or request.num_overtaken >= self._max_overtakes:
            return False
        if request not in self._front:
            if len(self._front) >= MAX_ASIDE:
                return False
            self.order.discard(request)
            self.put_back(request)
        return True

    # ---------------------------------------------------------------- out

    def board(self, request: Request, position: int, now: float) -> None:
        """The candidate at ``position`` leaves; it has overtaken those who tried before it."""
        for overtaken in self._front[:position]:
            overtaken.num_overtaken += 1
        if request in self._front:
            self._front.remove(request)
        else:
            self.order.take(request)
        if request.first_scheduled is None:
            request.first_scheduled = now
            self._tenants.withdraw(request)
            self._tenants.start(request)

    def forked(self, child: Request) -> None:
        """``child`` counts for its tenant from now on, with or without a seat."""
        self._parking.forked(child.tenant)
        self._tenants.start(child)

    def remove(self, request: Request) -> None:
        """Take out a cancelled request, wherever it waits; nothing happens where it doesn't."""
        if self._parking.discard(request):
            self._tenants.withdraw(request)
        elif request in self._front:
            self._front.remove(request)
            self.left(request)
        elif self.order.discard(request):
            self.left(request)

    def left(self, request: Request) -> None:
        """``request`` has left the queue or the engine: one that is parked may enter."""
        if request.first_scheduled is None:
            self._tenants.withdraw(request)
        else:
            self._tenants.leave(request)
        entering = self._parking.left(request.tenant)
        if entering is not None:
            self.order.push(entering)

    @property
    def num_queued_prompt_tokens(self) -> int:
        """Prompt tokens of all who have never run."""
        return self._tenants.num_queued_prompt_tokens

    def __len__(self) -> int:
        return len(self._front) + len(self.order) + len(self._parking)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._front, self.order, self._parking)


def make_waiting_room(config: EngineConfig, kv: KVCacheManager) -> WaitingRoom:
    """As the settings say: ``queue_order``, the tenants' weights and limits, ``max_overtakes``."""
    tenants = Tenants(config.tenant_weights, config.max_queued_tokens_per_tenant)
    parking = Parking(config.max_running_per_tenant)
    return WaitingRoom(_make_order(config, kv, tenants), tenants, parking, config.max_overtakes)


def _make_order(config: EngineConfig, kv: KVCacheManager, tenants: Tenants) -> QueueOrder:
    if config.queue_order == "priority":
        return Priority(config.default_priority_level, config.aging_s)
    if config.queue_order == "fair":
        return FairShare(tenants)
    if config.queue_order == "prefix":
        return PrefixMatch(kv, config.max_overtakes)
    return FirstCome()
