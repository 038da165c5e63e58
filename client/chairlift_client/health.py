"""Questions to a server's HTTP port, with the standard library only so that probes start fast."""

import errno
import http.client
import json
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"


class Reply(NamedTuple):
    """An HTTP status and its body."""

    status: int
    body: str


def ask(url: str, path: str, timeout: float, payload: Mapping[str, object] | None = None) -> Reply:
    """GET a path, or POST it with a JSON payload.

    Raises OSError (TimeoutError among them) when nobody answers.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port or 8000, timeout=timeout
    )
    try:
        if payload is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(payload))
        response = connection.getresponse()
        return Reply(response.status, response.read().decode("utf-8", "replace"))
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP answer from {url}: {error!r}") from error
    finally:
        connection.close()


def is_ready(url: str, model: str, timeout: float = 2.0) -> bool:
    """Whether the server and the model say that they are ready."""
    try:
        return all(
            ask(url, path, timeout).status == 200
            for path in ("/v2/health/ready", f"/v2/models/{model}/ready")
        )
    except OSError:
        return False


def why_not_listen(host: str, port: int) -> str | None:
    """Why no server can listen there, or None; lingering connections of a past one do not count."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "it is taken" if taken else error.strerror or str(error)
    return None
