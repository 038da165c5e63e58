"""Ports and HTTP questions."""

import socket

import pytest

from chairlift_client.errors import SetupError
from chairlift_client.health import ask, is_ready, why_not_listen
from chairlift_client.serve import check_ports
from chairlift_client.settings import ServeSettings


def test_a_taken_port_is_named_with_its_option(tmp_path: object) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert why_not_listen("127.0.0.1", port) == "it is taken"
        settings = ServeSettings(repository=tmp_path, http_port=port)  # type: ignore[arg-type]
        with pytest.raises(SetupError, match=f"--http-port {port} on 127.0.0.1: it is taken"):
            check_ports(settings)
    assert why_not_listen("127.0.0.1", port) is None


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    reason = why_not_listen(host, 8000)
    assert reason and "taken" not in reason


def test_a_port_that_says_nothing_is_not_ready_and_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not is_ready(url, "llm", timeout=0.1)
        with pytest.raises(TimeoutError):
            ask(url, "/", 0.1, {"x": 1})
