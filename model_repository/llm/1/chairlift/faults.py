"""Faults on order, for tests on a real server: a step that raises, hangs, or runs out of memory.

Active only where the environment variable CHAIRLIFT_FAULT_INJECTION is set. A fault is ordered by
a file ``fault`` in the control folder; it holds ``kind count``, and each step takes one off the
count.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

from .model_runner import PendingResult, Runner, StepResult
from .request import Request
from .scheduler import StepPlan

VARIABLE = "CHAIRLIFT_FAULT_INJECTION"


class OutOfMemoryError(RuntimeError):
    """Named like torch's, so that the engine treats it alike."""


class FirstInvalid(NamedTuple):
    """A step whose first row had NaN for logits."""

    pending: PendingResult

    def wait(self) -> StepResult:
        result = self.pending.wait()
        first, *others = result.samples
        return result._replace(samples=[first._replace(invalid=True), *others])


class FaultyRunner:
    """A runner that does as it is told before it does its work."""

    def __init__(self, runner: Runner, control_dir: Path) -> None:
        self._runner = runner
        self._order = control_dir / "fault"

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> PendingResult:
        kind = self._next_fault()
        if kind == "raise":
            raise RuntimeError("injected fault")
        if kind == "oom" and len(plan.rows) > 1:
            raise OutOfMemoryError("injected fault")
        if kind == "hang":
            threading.Event().wait()
        if kind == "exit":
            os._exit(1)
        pending = self._runner.launch(plan)
        return FirstInvalid(pending) if kind == "nan" else pending

    def release(self, request: Request) -> None:
        self._runner.release(request)

    def _next_fault(self) -> str | None:
        try:
            kind, count = self._order.read_text().split()
        except (FileNotFoundError, ValueError):
            return None
        if int(count) > 1:
            self._order.write_text(f"{kind} {int(count) - 1}")
        else:
            self._order.unlink()
        return kind


def injected(runner: Runner, control_dir: Path | None) -> Runner:
    """The runner itself, unless faults are wanted."""
    if control_dir is None or not os.environ.get(VARIABLE):
        return runner
    return FaultyRunner(runner, control_dir)
