"""A profile of the next N steps, ordered while the server runs.

A file ``profile`` in the control folder, which holds a number of steps, orders one. What comes of
it lies in a folder ``profile-<time>`` beside it (or under ``profile_dir``), which ``profile-done``
then names: ``operators.txt``, time by part, module, and operator; ``trace.json`` for Perfetto or
chrome://tracing; ``steps.jsonl``, one line per step. On a GPU each step is an NVTX range as well,
ordered or not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from .model_runner import PendingResult, Runner, StepResult
from .request import Request
from .scheduler import StepPlan
from .step_outputs import StepStats

logger = logging.getLogger(__name__)

ORDER = "profile"
DONE = "profile-done"
# Ten steps of SmolLM2 make 3 MB of trace; all of it is held in memory until it is written.
MAX_STEPS = 200
OPERATORS_SHOWN = 60


class StepProfiler:
    """Profiles in the engine's thread, as torch demands; orders and files are housekeeping's."""

    def __init__(self, control_dir: Path | None, folder: Path | None) -> None:
        self._control_dir = control_dir
        self._folder = folder or control_dir
        self._num_ordered = 0
        self._profile: profile | None = None
        self._steps: list[StepStats] = []
        self._finished: profile | None = None
        self._modules = _ModuleMarks()

    # ---------------------------------------------------------------- in the engine's thread

    def wrap(self, runner: Runner) -> Runner:
        """The runner with marks around its steps."""
        return _MarkedRunner(runner, self, nvtx=torch.cuda.is_available())

    def before_step(self) -> bool:
        """Start a profile that was ordered; True while one is being taken."""
        if self._num_ordered and self._profile is None and self._finished is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._steps = []
            self._profile = profile(activities=activities)
            self._profile.start()
            self._modules.start()
        return self._profile is not None

    def on_step(self, stats: StepStats) -> None:
        """A step has ended; with the last one ordered the profile ends."""
        if self._profile is None:
            return
        self._steps.append(stats)
        if len(self._steps) >= self._num_ordered:
            self._modules.stop()
            self._profile.stop()
            self._finished, self._profile = self._profile, None
            self._num_ordered = 0

    # ---------------------------------------------------------------- in the housekeeping thread

    def look(self) -> None:
        """Take an order, and write what has been finished."""
        if self._finished is not None:
            self._write(self._finished)
            self._finished = None
        if self._control_dir is None or self._num_ordered:
            return
        order = self._control_dir / ORDER
        if order.exists():
            text = order.read_text().strip()
            order.unlink()
            if text.isdecimal() and 0 < int(text) <= MAX_STEPS:
                self._num_ordered = int(text)
                logger.info("profiling the next %s steps", text)
            else:
                logger.warning("%s holds %r; want a number from 1 to %d", order, text, MAX_STEPS)

    def _write(self, finished: profile) -> None:
        assert self._folder is not None and self._control_dir is not None
        folder = self._folder / time.strftime("profile-%Y%m%d-%H%M%S", time.gmtime())
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "steps.jsonl").open("w") as lines:
            lines.writelines(json.dumps(step._asdict()) + "\n" for step in self._steps)
        column = "self_cuda" if torch.cuda.is_available() else "self_cpu"
        table = finished.key_averages().table(f"{column}_time_total", OPERATORS_SHOWN)
        (folder / "operators.txt").write_text(f"{summary(self._steps)}\n{table}\n")
        finished.export_chrome_trace(str(folder / "trace.json"))
        logger.info("profile of %d steps: %s", len(self._steps), folder)
        partial = self._control_dir / f"{DONE}.new"
        partial.write_text(str(folder))
        partial.replace(self._control_dir / DONE)


class _ModuleMarks:
    """Marks the model's modules in the profile: torch does not see into our CPU operators."""

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._open: list[record_function] = []

    def start(self) -> None:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: Module, *_: Any) -> None:
        mark = record_function(type(module).__name__)
        mark.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(mark)

    def _leave(self, module: Module, *_: Any) -> None:
        self._open.pop().__exit__(None, None, None)


class _MarkedRunner:
    """Marks each step in the profile, and for NVIDIA's tools."""

    def __init__(self, runner: Runner, profiler: StepProfiler, *, nvtx: bool) -> None:
        self._runner = runner
        self._profiler = profiler
        self._nvtx = nvtx

    def run(self, plan: StepPlan) -> StepResult:
        with self._marks(plan):
            return self._runner.run(plan)

    def launch(self, plan: StepPlan) -> PendingResult:
        with self._marks(plan):
            return self._runner.launch(plan)

    @contextmanager
    def _marks(self, plan: StepPlan) -> Iterator[None]:
        profiled = self._profiler.before_step()
        if not (profiled or self._nvtx):
            yield
            return
        num_prefill_tokens = plan.num_tokens - len(plan.decodes)
        name = f"step: {len(plan.decodes)} decodes, {num_prefill_tokens} prompt tokens"
        with ExitStack() as marks:
            if profiled:
                marks.enter_context(record_function(name))
            if self._nvtx:
                marks.enter_context(torch.cuda.nvtx.range(name))
            yield

    def release(self, request: Request) -> None:
        self._runner.release(request)


def summary(steps: Sequence[StepStats]) -> str:
    """Where the time of these steps went, in shares of all of it."""
    total = steps[-1].finished - steps[0].started
    scheduling = sum(step.scheduled - step.started for step in steps)
    computing = sum(step.finished - step.scheduled for step in steps)
    tokens = sum(step.num_decodes + step.num_prefill_tokens for step in steps)
    return (
        f"{len(steps)} steps in {total:.4f} s, {tokens} tokens: "
        f"scheduling {scheduling / total:.1%}, computing and collecting {computing / total:.1%}, "
        f"between steps {(total - scheduling - computing) / total:.1%}"
    )
