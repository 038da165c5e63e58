"""A profile is ordered by a file, covers the steps asked for, and leaves nothing behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chairlift.model_runner import StepResult
from chairlift.profiling import MAX_STEPS, StepProfiler, summary
from chairlift.scheduler import StepPlan
from tests.unit.metrics_harness import step


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Runner:
    """Runs a module where a model would run."""

    def __init__(self) -> None:
        self.module = Doubling()
        self.released: list[Any] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.module(torch.ones(8))
        return StepResult([], [])

    def release(self, request: Any) -> None:
        self.released.append(request)


def engine_steps(profiler: StepProfiler, runner: Any, number: int) -> None:
    for index in range(number):
        runner.run(StepPlan(num_tokens=4))
        profiler.on_step(step(started=float(index), scheduled=index + 0.1, finished=index + 0.9))


def test_an_order_gives_a_profile_of_so_many_steps(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, None)
    runner = profiler.wrap(Runner())
    (tmp_path / "profile").write_text("3\n")
    engine_steps(profiler, runner, 2)
    profiler.look()
    assert not (tmp_path / "profile").exists()
    engine_steps(profiler, runner, 2)
    profiler.look()
    assert not (tmp_path / "profile-done").exists()
    engine_steps(profiler, runner, 2)
    profiler.look()

    folder = Path((tmp_path / "profile-done").read_text())
    assert folder.parent == tmp_path
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert len(lines) == 3 and lines[0]["num_decodes"] == 4
    operators = (folder / "operators.txt").read_text()
    assert "3 steps" in operators and "aten::add" in operators and "Doubling" in operators
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("step: 0 decodes, 4 prompt tokens") == 3
    assert names.count("Doubling") == 3


def test_a_second_order_gives_a_second_profile(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path, tmp_path / "elsewhere")
    runner = profiler.wrap(Runner())
    for number in (1, 2):
        (tmp_path / "profile").write_text(str(number))
        profiler.look()
        engine_steps(profiler, runner, 3)
        profiler.look()
        folder = Path((tmp_path / "profile-done").read_text())
        assert folder.parent == tmp_path / "elsewhere"
        assert len((folder / "steps.jsonl").read_text().splitlines()) == number


def test_senseless_orders_are_refused(tmp_path: Path, caplog: Any) -> None:
    profiler = StepProfiler(tmp_path, None)
    runner = profiler.wrap(Runner())
    for text in ("", "0", "-3", "many", str(MAX_STEPS + 1), "1.5"):
        (tmp_path / "profile").write_text(text)
        profiler.look()
        engine_steps(profiler, runner, 1)
        profiler.look()
        assert not (tmp_path / "profile").exists()
    assert len(caplog.records) == 6
    assert not list(tmp_path.iterdir())


def test_a_step_that_raises_does_not_count_and_keeps_the_marks_paired(tmp_path: Path) -> None:
    class Failing(Runner):
        fail = True

        def run(self, plan: StepPlan) -> StepResult:
            super().run(plan)
            if self.fail:
                raise RuntimeError("injected")
            return StepResult([], [])

    inner = Failing()
    profiler = StepProfiler(tmp_path, None)
    runner = profiler.wrap(inner)
    (tmp_path / "profile").write_text("1")
    profiler.look()
    try:
        runner.run(StepPlan(num_tokens=1))
    except RuntimeError:
        inner.fail = False
    engine_steps(profiler, runner, 1)
    profiler.look()
    folder = Path((tmp_path / "profile-done").read_text())
    assert len((folder / "steps.jsonl").read_text().splitlines()) == 1


def test_without_a_control_folder_nothing_is_profiled() -> None:
    inner = Runner()
    profiler = StepProfiler(None, None)
    runner = profiler.wrap(inner)
    profiler.look()
    engine_steps(profiler, runner, 2)
    profiler.look()
    runner.release("a request")
    assert inner.released == ["a request"]


def test_summary_says_where_the_time_went() -> None:
    steps = [
        step(started=0.0, scheduled=0.1, finished=1.0),
        step(started=1.5, scheduled=1.6, finished=2.0),
    ]
    assert summary(steps) == (
        "2 steps in 2.0000 s, 8 tokens: scheduling 10.0%, computing and collecting 65.0%, "
        "between steps 25.0%"
    )
