"""Orders a profile or a trace through the control folder and waits for it."""

import time
from pathlib import Path

from chairlift_client.control import ControlDir
from chairlift_client.errors import GenerateError, SetupError

POLL_SECONDS = 0.1
ANSWER_SECONDS = 30.0


def order_profile(control: Path, steps: int, timeout: float) -> Path:
    """The folder with the profile of the next steps.

    Raises SetupError where no engine lives there, GenerateError where it has too little to do.
    """
    folder = ControlDir(control)
    if folder.heartbeat() is None:
        raise SetupError(f"no engine's heartbeat in {control}")
    folder.request_profile(steps)
    deadline = time.monotonic() + timeout
    while (finished := folder.finished_profile()) is None:
        if time.monotonic() > deadline:
            raise GenerateError(f"fewer than {steps} steps in {timeout:.0f} s: send it requests")
        time.sleep(POLL_SECONDS)
    return finished


def record_trace(control: Path, seconds: float) -> Path:
    """The file with a timeline of the steps of the next ``seconds``.

    Raises SetupError where no engine lives there, GenerateError where it does not answer.
    """
    folder = ControlDir(control)
    if folder.heartbeat() is None:
        raise SetupError(f"no engine's heartbeat in {control}")
    folder.switch_trace("on")
    time.sleep(seconds)
    folder.switch_trace("off")
    deadline = time.monotonic() + ANSWER_SECONDS
    while (finished := folder.finished_trace()) is None:
        if time.monotonic() > deadline:
            raise GenerateError(f"the engine wrote no trace within {ANSWER_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)
    return finished
