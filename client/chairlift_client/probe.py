"""The three probes: what a started, a ready and a living server look like from beside it."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from chairlift_client.control import CONTROL_VARIABLE, ControlDir
from chairlift_client.health import ask, is_ready


class Target(NamedTuple):
    """The server to probe; times in seconds."""

    url: str
    model: str
    timeout: float
    heartbeat_timeout: float


def check(kind: str, target: Target, environ: Mapping[str, str] = os.environ) -> str | None:
    """Why the server fails the probe, or None when it passes.

    The heartbeat counts where the environment names the control folder, as in the container.
    """
    folder = environ.get(CONTROL_VARIABLE)
    control = ControlDir(Path(folder)) if folder else None
    if kind == "liveness":
        return _liveness(target, control)
    if not is_ready(target.url, target.model, target.timeout):
        return f"{target.model} is not ready at {target.url}"
    return _heartbeat_failure(control, target, serving=kind == "readiness")


def _liveness(target: Target, control: ControlDir | None) -> str | None:
    """Ask for one token.

    A server too busy to answer in time lives as long as its engine loop turns: killing it would add
    to the load. One that refuses because it is full or draining lives as well.
    """
    payload = {"text_input": "Hi", "max_tokens": 1, "stream": False}
    try:
        reply = ask(target.url, f"/v2/models/{target.model}/generate", target.timeout, payload)
    except TimeoutError:
        if control is not None and _heartbeat_failure(control, target, serving=False) is None:
            return None
        return f"no token within {target.timeout} s"
    except OSError as error:
        return f"no answer from {target.url}: {error}"
    if reply.status == 200:
        return None
    refused = reply.status == 503 and any(w in reply.body for w in ("queue", "drain", "timeout"))
    return None if refused else f"HTTP {reply.status}: {reply.body[:200]}"


def _heartbeat_failure(control: ControlDir | None, target: Target, *, serving: bool) -> str | None:
    if control is None:
        return None
    heartbeat = control.heartbeat()
    if heartbeat is None:
        return "no heartbeat"
    age = time.time() - heartbeat.time
    if age > target.heartbeat_timeout:
        return f"the engine's loop last turned {age:.0f} s ago"
    if heartbeat.state == "unhealthy" or (serving and heartbeat.state != "serving"):
        return f"the engine is {heartbeat.state}"
    return None
