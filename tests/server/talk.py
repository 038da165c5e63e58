"""Talking to a server in few words: one answer, one stream, the canary, and waiting for rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any, NamedTuple

from tests.server.harness import ServerProcess, wait_for

CANARY = {"text_input": "The quick brown fox", "max_tokens": 16, "temperature": 0.0}


class Reply(NamedTuple):
    status: int
    body: dict[str, Any]

    @property
    def text(self) -> str:
        assert self.status == 200, self.body
        text: str = self.body["text_output"]
        return text


def post(server: ServerProcess, path: str, body: object, timeout: float = 120.0) -> Reply:
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=timeout)
    try:
        payload = body if isinstance(body, str | bytes) else json.dumps(body)
        connection.request("POST", path, payload)
        response = connection.getresponse()
        return Reply(response.status, json.loads(response.read() or b"{}"))
    finally:
        connection.close()


def generate(server: ServerProcess, model: str = "llm", **body: Any) -> Reply:
    """POST /generate: one whole answer."""
    return post(server, f"/v2/models/{model}/generate", body)


def stream(server: ServerProcess, model: str = "llm", **body: Any) -> Iterator[dict[str, Any]]:
    """POST /generate_stream: the events as they come; closing it drops the connection."""
    connection = HTTPConnection("127.0.0.1", server.http_port, timeout=120.0)
    try:
        request = json.dumps({"stream": True, **body})
        connection.request("POST", f"/v2/models/{model}/generate_stream", request)
        response = connection.getresponse()
        while line := response.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[len(b"data: ") :])
    finally:
        if connection.sock is not None:
            connection.sock.close()
        connection.close()


def joined(events: Iterator[dict[str, Any]]) -> str:
    return "".join(event["text_output"] for event in events)


def canary(server: ServerProcess) -> str:
    """The answer that must be the same whatever happened before."""
    return generate(server, **CANARY).text


def heartbeat(server: ServerProcess) -> dict[str, Any]:
    beat: dict[str, Any] = json.loads((server.control.path / "heartbeat").read_text())
    return beat


def wait_drained(server: ServerProcess, seconds: float = 10.0) -> None:
    """Until nothing runs, nothing waits, and no live request holds a block."""

    def at_rest() -> bool:
        beat = heartbeat(server)
        return not (beat["running"] or beat["waiting"] or beat["open"] or beat["blocks_used"])

    wait_for("no request and no block held", at_rest, seconds)
