"""Orders a profile through the control folder and waits for it."""

import time
from pathlib import Path

from chairlift_client.control import ControlDir
from chairlift_client.errors import GenerateError, SetupError

POLL_SECONDS = 0.1


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
