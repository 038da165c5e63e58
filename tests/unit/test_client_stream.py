"""Streaming clients: HTTP against a small server of our own, gRPC tensors by themselves."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from chairlift_client.errors import GenerateError
from chairlift_client.stream import Endpoint, generate, parse_url, stream_chunks
from chairlift_client.stream_grpc import TensorSpec, tensor

Script = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each POST with the test's script."""

    protocol_version = "HTTP/1.1"
    script: Script
    body: dict[str, object]

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).script(self)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def event(self, **fields: object) -> None:
        data = f"data: {json.dumps(fields)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def http_server(script: Script) -> Iterator[str]:
    handler = type("Scripted", (Handler,), {"script": staticmethod(script)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("grpc://h:1", Endpoint("grpc", "h", 1)),
        ("http://h", Endpoint("http", "h", 8000)),
        ("h:7", Endpoint("grpc", "h", 7)),
        ("h", Endpoint("grpc", "h", 8001)),
    ],
)
def test_urls(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize("url", ["https://h", "ftp://h", "grpc://h:port"])
def test_urls_that_mean_nothing(url: str) -> None:
    with pytest.raises(GenerateError, match="URL"):
        parse_url(url)


def test_either_prompt_or_messages() -> None:
    for arguments in ({}, {"prompt": "x", "messages": []}):
        with pytest.raises(GenerateError, match="either"):
            stream_chunks("http://h", **arguments)  # type: ignore[arg-type]


def test_http_stream_yields_text_and_outputs() -> None:
    seen: list[dict[str, object]] = []

    def script(handler: Handler) -> None:
        seen.append(handler.body)
        handler.begin()
        handler.event(text_output="a b", finish_reason="None")
        handler.event(text_output="", finish_reason="None")
        handler.event(text_output=" ü\u2028", finish_reason="stop")
        handler.end()

    messages = [{"role": "user", "content": "héllo"}]
    with http_server(script) as url:
        assert list(generate(url, messages=messages, max_tokens=3, seed=None)) == [
            "a b",
            " ü\u2028",
        ]
        chunks = list(stream_chunks(url, "x", request_id="7", stop_words=["a", "b"]))
    assert chunks[-1].outputs["finish_reason"] == "stop"
    assert json.loads(str(seen[0].pop("messages"))) == messages
    assert seen[0] == {"stream": True, "max_tokens": 3}
    assert seen[1] == {"text_input": "x", "stream": True, "id": "7", "stop_words": ["a", "b"]}


def test_http_error_event_ends_the_stream() -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(text_output="a")
        handler.event(error="out of luck")
        handler.end()

    with http_server(script) as url:
        stream = generate(url, "x")
        assert next(stream) == "a"
        with pytest.raises(GenerateError, match="out of luck"):
            next(stream)


def test_http_refusals_carry_the_servers_words() -> None:
    def script(handler: Handler) -> None:
        refusal = json.dumps({"error": "too long"})
        bodies = {"x": refusal, "event": f"data: {refusal}\n\n", "y": "boom"}
        body = bodies[str(handler.body["text_input"])]
        handler.send_response(400)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body.encode())

    with http_server(script) as url:
        for prompt in ("x", "event"):
            with pytest.raises(GenerateError, match="^too long$"):
                next(generate(url, prompt))
        with pytest.raises(GenerateError, match="HTTP 400: boom"):
            next(generate(url, "y"))


def test_http_connection_that_breaks_is_an_error_not_an_end() -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(text_output="a")
        handler.close_connection = True

    with http_server(script) as url:
        stream = generate(url, "x")
        assert next(stream) == "a"
        with pytest.raises(GenerateError, match="closed the connection"):
            next(stream)


def test_http_timeout_bounds_the_whole_answer() -> None:
    released = threading.Event()

    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(text_output="a")
        released.wait(30.0)

    with http_server(script) as url:
        stream = generate(url, "x", timeout=0.3)
        try:
            with pytest.raises(GenerateError, match=r"within 0\.3 s"):
                list(stream)
        finally:
            released.set()


def test_closing_an_http_stream_closes_the_connection() -> None:
    noticed = threading.Event()

    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(text_output="a")
        handler.connection.recv(1)  # returns when the other side closes
        noticed.set()
        handler.close_connection = True

    with http_server(script) as url:
        stream = generate(url, "x")
        assert next(stream) == "a"
        stream.close()
        assert noticed.wait(30.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_nobody_there(url: str) -> None:
    with pytest.raises(GenerateError, match=r"127\.0\.0\.1:1"):
        next(generate(url, "x", timeout=10.0))


@pytest.mark.parametrize(
    ("value", "spec", "shape", "data"),
    [
        ("hé", TensorSpec("BYTES", 2), [1, 1], ["hé".encode()]),
        (["a", "b"], TensorSpec("BYTES", 2), [1, 2], [b"a", b"b"]),
        ({"n": 1}, TensorSpec("BYTES", 1), [1], [b'{"n": 1}']),
        (3, TensorSpec("INT32", 1), [1], [3]),
        (2**63, TensorSpec("UINT64", 2), [1, 1], [2**63]),
        (0.5, TensorSpec("FP32", 2), [1, 1], [0.5]),
        (1, TensorSpec("FP32", 2), [1, 1], [1.0]),
        (True, TensorSpec("BOOL", 2), [1, 1], [True]),
    ],
)
def test_tensors_take_the_declared_type_and_rank(
    value: object, spec: TensorSpec, shape: list[int], data: list[object]
) -> None:
    made = tensor("x", value, spec)  # type: ignore[arg-type]
    assert made.shape() == shape and made.datatype() == spec.dtype
    raw = made._get_content()
    if spec.dtype == "BYTES":
        lengths = b"".join(np.uint32(len(d)).tobytes() + d for d in data)  # type: ignore
        assert raw == lengths
    else:
        dtype = {"INT32": "i4", "UINT64": "u8", "FP32": "f4", "BOOL": "?"}[spec.dtype]
        assert np.frombuffer(raw, dtype).tolist() == data


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1.5, "INT32"),
        ("many", "INT32"),
        (2**40, "INT32"),
        (-1, "UINT64"),
        ("x", "FP32"),
        (2, "BOOL"),
    ],
)
def test_values_that_do_not_fit_are_refused(value: object, dtype: str) -> None:
    with pytest.raises(GenerateError, match="top_k"):
        tensor("top_k", value, TensorSpec(dtype, 2))  # type: ignore[arg-type]


class EndedStream:
    """A gRPC client whose stream's time was over before the request could be sent."""

    cancelled: list[bool]

    def __init__(self, *args: object, **options: object) -> None:
        self.callback: Callable[[object, Exception], None] | None = None

    def get_model_metadata(self, model: str, client_timeout: float) -> object:
        return type("Metadata", (), {"inputs": ()})

    def start_stream(self, callback: Callable[[object, Exception], None], **_: object) -> None:
        self.callback = callback

    def async_stream_infer(self, *args: object, **_: object) -> None:
        assert self.callback is not None
        self.callback(None, InferenceServerException("Deadline Exceeded"))
        raise InferenceServerException("The stream is no longer in valid state")

    def stop_stream(self, cancel_requests: bool) -> None:
        self.cancelled.append(cancel_requests)

    def close(self) -> None: ...


def test_a_stream_that_ended_before_the_request_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EndedStream, "cancelled", [], raising=False)
    monkeypatch.setattr(grpc, "InferenceServerClient", EndedStream)
    with pytest.raises(GenerateError, match="Deadline Exceeded"):
        list(stream_chunks("grpc://127.0.0.1:1", prompt="x", timeout=0.1))
    assert EndedStream.cancelled == [False], "tritonserver keeps the socket of a stream that ends"
