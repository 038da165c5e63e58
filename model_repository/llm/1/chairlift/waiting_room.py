"""Everybody without a seat: who may try to board next, and who may pass whom."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain

from .queue_order import QueueOrder
from .request import Request

# Requests that may stand aside at once because they don't fit. Each is looked at again whenever
# memory is freed, so this bounds the cost of a step; the queue behind them is never searched.
MAX_ASIDE = 8


class WaitingRoom:
    """The queue, and before it the *front*: those who have been at its head already.

    The front holds preempted requests and forks without a seat, whom nobody behind may pass, and
    requests set aside because they do not fit into memory: smaller ones pass such a request
    ``max_overtakes`` times, then nobody does, and what leaves makes room for it.
    """

    def __init__(self, order: QueueOrder, max_overtakes: int) -> None:
        self.order = order
        self._max_overtakes = max_overtakes
        self._front: list[Request] = []

    def add(self, request: Request) -> None:
        self.order.push(request)

    def put_back(self, request: Request) -> None:
        """Return a request that has started: it waits before everybody of a later rank."""
        insort(self._front, request, key=self.order.rank)

    def candidate(self, position: int) -> Request | None:
        """Who may try to board after ``position`` others have tried without success."""
        head = self.order.peek()
        if position == len(self._front):
            return head
        waiting = self._front[position]
        return head if head is not None and self.order.outranks(head, waiting) else waiting

    def board(self, request: Request, position: int) -> None:
        """The candidate at ``position`` leaves; it has overtaken those who tried before it."""
        for overtaken in self._front[:position]:
            overtaken.num_overtaken += 1
        self.remove(request)

    def set_aside(self, request: Request) -> bool:
        """The candidate doesn't fit: keep its place, and say whether the next one may try."""
        if request.first_scheduled is not None or request.num_overtaken >= self._max_overtakes:
            return False
        if request is self.order.peek():
            if len(self._front) >= MAX_ASIDE:
                return False
            self.put_back(self.order.pop())
        return True

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits; nothing happens where it doesn't."""
        if request in self._front:
            self._front.remove(request)
        else:
            self.order.discard(request)

    def first(self, number: int) -> list[Request]:
        """Those who board next, if everybody fits."""
        return [*self._front, *self.order.first(number)][:number]

    def __len__(self) -> int:
        return len(self._front) + len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._front, self.order)
