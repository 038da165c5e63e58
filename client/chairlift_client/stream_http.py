"""generate_stream over HTTP, with the standard library's client."""

import http.client
import json
import time
from collections.abc import Generator, Mapping

from chairlift_client.errors import GenerateError
from chairlift_client.stream import Chunk, Endpoint, Query


def http_chunks(endpoint: Endpoint, query: Query) -> Generator[Chunk, None, None]:
    """Yield the events of one generate_stream call; closing it drops the connection.

    Raises GenerateError for a refusal, an error event, a broken connection or a timeout.
    """
    deadline = None if query.timeout is None else time.monotonic() + query.timeout
    connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=query.timeout)
    try:
        response = _post(connection, query)
        if response.status != 200:
            raise GenerateError(_error_text(response.read(), response.status))
        for line in _lines(response, connection, deadline):
            if line.startswith(b"data:"):
                yield _chunk(json.loads(line[5:]))
    except TimeoutError as error:
        raise GenerateError(f"no answer within {query.timeout} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise GenerateError(f"{endpoint.host}:{endpoint.port}: {_reason(error)}") from error
    finally:
        connection.close()


def _post(connection: http.client.HTTPConnection, query: Query) -> http.client.HTTPResponse:
    inputs = {
        name: json.dumps(value) if isinstance(value, Mapping) else value
        for name, value in query.inputs.items()
    }
    body = inputs | ({"id": query.request_id} if query.request_id else {})
    connection.request(
        "POST",
        f"/v2/models/{query.model}/generate_stream",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return connection.getresponse()


def _lines(
    response: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    deadline: float | None,
) -> Generator[bytes, None, None]:
    """The body's lines; `readline` would take a connection that broke for the body's end."""
    rest = b""
    while True:
        _limit_next_read(connection, deadline)
        block = response.read1(1 << 16)
        if not block:
            return
        *lines, rest = (rest + block).split(b"\n")
        yield from lines


def _limit_next_read(connection: http.client.HTTPConnection, deadline: float | None) -> None:
    """The socket's timeout bounds one read, so give it what is left of the whole."""
    if deadline is None or connection.sock is None:
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.sock.settimeout(left)


def _chunk(event: dict[str, object]) -> Chunk:
    if "error" in event:
        raise GenerateError(str(event["error"]))
    text = event.get("text_output", "")
    return Chunk("".join(text) if isinstance(text, list) else str(text), event)


def _error_text(body: bytes, status: int) -> str:
    """The server's words; it refuses a stream with JSON, or with an event that holds JSON."""
    try:
        return str(json.loads(body.removeprefix(b"data:"))["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body.decode('utf-8', 'replace')[:200]}"


def _reason(error: Exception) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the server closed the connection within the answer"
    return str(error) or type(error).__name__
