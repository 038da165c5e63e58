"""Who is open: shared between the execute, output, and housekeeping threads."""

from __future__ import annotations

import threading

from .answers import Answer, ClientRequest


class OpenRequests:
    """The clients' requests that have not had their FINAL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[int, ClientRequest] = {}

    def add(self, client: ClientRequest) -> None:
        with self._lock:
            self._clients[id(client)] = client

    def remove(self, answer: Answer) -> None:
        """One row has ended; with the last one the client's request is closed."""
        if answer.client.open_rows == 0:
            with self._lock:
                self._clients.pop(id(answer.client), None)

    def snapshot(self) -> list[ClientRequest]:
        with self._lock:
            return list(self._clients.values())

    def by_request_id(self, request_id: str) -> list[ClientRequest]:
        return [client for client in self.snapshot() if client.request_id == request_id]

    def __len__(self) -> int:
        return len(self._clients)
