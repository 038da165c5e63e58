"""Ends requests whose deadline has passed or whose client has gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from .answers import ClientRequest
from .errors import ErrorCode, RequestError
from .open_requests import OpenRequests


class Aborter(Protocol):
    """The part of the engine that this needs."""

    def abort(self, group: int, error: RequestError | None = None) -> None: ...


class ClientWatch:
    """Deadlines are looked at in every round; whether a client has cancelled must be asked of
    Triton, one round trip between processes for each, so that a round asks for ``asking_s`` seconds
    and at least once, those first that were asked longest ago."""

    def __init__(
        self,
        open_requests: OpenRequests,
        engine: Aborter,
        clock: Callable[[], float],
        asking_s: float,
    ) -> None:
        self._open = open_requests
        self._engine = engine
        self._clock = clock
        self._asking_s = asking_s

    def look(self) -> None:
        """One round."""
        now = self._clock()
        clients = [client for client in self._open.snapshot() if not client.cancelled]
        for client in clients:
            if client.deadline is not None and now >= client.deadline:
                self._end(client, "Request timeout expired", ErrorCode.UNAVAILABLE)
        for client in sorted(clients, key=lambda client: client.asked_at):
            if client.cancelled:
                continue
            if client.responder.is_cancelled():
                self._end(client, "Request was cancelled", ErrorCode.CANCELLED)
            client.asked_at = self._clock()
            if client.asked_at - now >= self._asking_s:
                break

    def _end(self, client: ClientRequest, message: str, code: ErrorCode) -> None:
        client.cancelled = True
        for group in client.groups:
            self._engine.abort(group, RequestError(message, code))
