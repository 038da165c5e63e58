"""Stream text from a server over gRPC or HTTP, with one kind of error and no stream left open."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from chairlift_client.errors import GenerateError

DEFAULT_URL = "grpc://127.0.0.1:8001"
DEFAULT_PORTS = {"grpc": 8001, "http": 8000}

Message = Mapping[str, str]
Value = str | int | float | bool | Sequence[str] | Sequence[int] | Mapping[str, object]


class Endpoint(NamedTuple):
    """Where a server listens, and with which protocol."""

    protocol: str
    host: str
    port: int


class Chunk(NamedTuple):
    """One response: its text, and every output tensor by name as a scalar or a list."""

    text: str
    outputs: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Query:
    """One request in the server's terms; `timeout` is in seconds and bounds the whole answer."""

    model: str
    inputs: Mapping[str, Value]
    request_id: str = ""
    timeout: float | None = None


def parse_url(url: str) -> Endpoint:
    """Read grpc://host:port, http://host:port, or host:port, which means gRPC.

    Raises GenerateError for another scheme or a port that is no number.
    """
    parts = urlsplit(url if "//" in url else f"grpc://{url}")
    if parts.scheme not in DEFAULT_PORTS:
        raise GenerateError(f"{url}: the URL must start with grpc:// or http://")
    try:
        port = parts.port or DEFAULT_PORTS[parts.scheme]
    except ValueError as error:
        raise GenerateError(f"{url}: the URL has no valid port") from error
    return Endpoint(parts.scheme, parts.hostname or "127.0.0.1", port)


def generate(
    url: str = DEFAULT_URL,
    prompt: str | None = None,
    *,
    messages: Sequence[Message] | None = None,
    model: str = "llm",
    timeout: float | None = None,
    request_id: str = "",
    **params: Value | None,
) -> Generator[str, None, None]:
    """Yield the text of one answer as it comes; closing the iterator cancels the request.

    `params` are the model's inputs by name (max_tokens, temperature, stop_words, ...); other names
    travel as request parameters. Raises GenerateError.
    """
    chunks = stream_chunks(
        url,
        prompt,
        messages=messages,
        model=model,
        timeout=timeout,
        request_id=request_id,
        **params,
    )
    with closing(chunks):
        for chunk in chunks:
            if chunk.text:
                yield chunk.text


def stream_chunks(
    url: str = DEFAULT_URL,
    prompt: str | None = None,
    *,
    messages: Sequence[Message] | None = None,
    model: str = "llm",
    timeout: float | None = None,
    request_id: str = "",
    **params: Value | None,
) -> Generator[Chunk, None, None]:
    """Like `generate`, with every output tensor of every response."""
    if (prompt is None) == (messages is None):
        raise GenerateError("give either a prompt or messages")
    inputs: dict[str, Value] = {"stream": True}
    if prompt is not None:
        inputs["text_input"] = prompt
    if messages is not None:
        inputs["messages"] = json.dumps(list(messages), ensure_ascii=False)
    inputs.update({name: value for name, value in params.items() if value is not None})
    query = Query(model, inputs, request_id, timeout)
    endpoint = parse_url(url)
    if endpoint.protocol == "http":
        from chairlift_client.stream_http import http_chunks

        return http_chunks(endpoint, query)
    from chairlift_client.stream_grpc import grpc_chunks

    return grpc_chunks(endpoint, query)
