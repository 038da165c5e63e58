"""Probes and the control folder."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from chairlift_client import probe
from chairlift_client.control import ControlDir, Heartbeat, process_is_alive
from chairlift_client.health import Reply
from chairlift_client.probe import Target, check

TARGET = Target("http://127.0.0.1:1", "llm", timeout=1.0, heartbeat_timeout=30.0)


@pytest.fixture
def control(tmp_path: Path) -> ControlDir:
    folder = ControlDir(tmp_path / "control")
    folder.reset()
    return folder


def beat(control: ControlDir, state: str = "serving", age: float = 0.0) -> None:
    beat = {"time": time.time() - age, "state": state, "pid": 7}
    (control.path / "heartbeat").write_text(json.dumps(beat))


def ask(kind: str, control: ControlDir | None) -> str | None:
    return check(kind, TARGET, {"CHAIRLIFT_CONTROL_DIR": str(control.path)} if control else {})


def test_reset_forgets_the_past(control: ControlDir) -> None:
    (control.path / "heartbeat").write_text('{"time": 1, "state": "serving", "pid": 7}')
    control.request_drain(12.5)
    assert control.heartbeat() == Heartbeat(1.0, "serving", 0, 0, 7)
    assert float((control.path / "drain").read_text()) == 12.5
    control.reset()
    assert control.heartbeat() is None and list(control.path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"time": 1}', '{"time": "x", "state": 1, "pid": 1}']
)
def test_a_broken_heartbeat_is_none(control: ControlDir, text: str) -> None:
    (control.path / "heartbeat").write_text(text)
    assert control.heartbeat() is None


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["/bin/sh", "-c", "exit 0"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process_is_alive(process.pid)
    finally:
        process.wait()
    assert not process_is_alive(process.pid) and process_is_alive(os.getpid())


@pytest.mark.parametrize(
    ("state", "age", "startup", "readiness"),
    [
        ("serving", 0.0, None, None),
        ("draining", 0.0, None, "draining"),
        ("unhealthy", 0.0, "unhealthy", "unhealthy"),
        ("serving", 60.0, "60 s ago", "60 s ago"),
        (None, 0.0, "no heartbeat", "no heartbeat"),
    ],
)
def test_startup_and_readiness(
    control: ControlDir,
    monkeypatch: pytest.MonkeyPatch,
    state: str | None,
    age: float,
    startup: str | None,
    readiness: str | None,
) -> None:
    monkeypatch.setattr(probe, "is_ready", lambda url, model, timeout: True)
    if state is not None:
        beat(control, state, age)
    for kind, expected in (("startup", startup), ("readiness", readiness)):
        failure = ask(kind, control)
        assert failure is None if expected is None else expected in (failure or "")
        assert ask(kind, None) is None


@pytest.mark.parametrize("kind", ["startup", "readiness", "liveness"])
def test_nobody_there(kind: str, control: ControlDir) -> None:
    beat(control)
    assert ask(kind, control) is not None


@pytest.mark.parametrize(
    ("reply", "passes"),
    [
        (Reply(200, "{}"), True),
        (Reply(503, '{"error":"Exceeds maximum queue size"}'), True),
        (Reply(503, '{"error":"the server is draining"}'), True),
        (Reply(503, '{"error":"Model is unavailable due to unhealthy engine"}'), False),
        (Reply(500, '{"error":"Stub process is not healthy."}'), False),
    ],
)
def test_liveness_judges_the_answer(
    monkeypatch: pytest.MonkeyPatch, reply: Reply, passes: bool
) -> None:
    monkeypatch.setattr(probe, "ask", lambda *_: reply)
    assert (ask("liveness", None) is None) == passes


def test_a_busy_server_lives_while_its_loop_turns(
    control: ControlDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(*_: object) -> Reply:
        raise TimeoutError

    monkeypatch.setattr(probe, "ask", too_slow)
    assert "no token within" in (ask("liveness", None) or "")
    beat(control)
    assert ask("liveness", control) is None
    beat(control, age=60.0)
    assert "no token within" in (ask("liveness", control) or "")
