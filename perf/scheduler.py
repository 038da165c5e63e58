"""What a scheduling step costs: CPU microseconds per step and per running row, without a model.

    python perf/scheduler.py [--steps N] [--quick] [--json FILE]

*steady*: everybody decodes, all seats are taken, others wait. *blocked*: seats are free, but the
head of the queue does not fit into memory. *churn*: answers of 64 tokens on average end and others
board in their place, with memory for all (roomy) or for three quarters of them (tight); it includes
adding and finishing requests. Times are medians of the thread's CPU time, so that a busy machine
changes them little; the collector is off, as the engine freezes its heap.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "model_repository" / "llm" / "1"))

from rich.console import Console
from rich.table import Table

from chairlift.config import EngineConfig
from chairlift.kv_cache import KVCacheManager
from chairlift.policies import make_batch_policy
from chairlift.request import Request, SamplingParams
from chairlift.scheduler import Scheduler, StepPlan
from chairlift.waiting_room import make_waiting_room

BLOCK_SIZE = 16
PROMPT = 200
SHARED_PROMPT = 96
MEAN_ANSWER = 64
ROWS = (1, 8, 64, 256, 1024)
WAITING = (0, 100, 10_000)


class Cost(NamedTuple):
    """Medians of one scenario, in microseconds."""

    scenario: str
    prefix_cache: bool
    running: int
    waiting: int
    us_per_step: float
    us_per_row: float


class Load:
    """A scheduler with requests; ``advance`` plays the model: one token for every row."""

    def __init__(self, running: int, num_blocks: int, *, prefix_cache: bool, seats: int) -> None:
        config = EngineConfig(
            max_num_seqs=seats,
            max_num_batched_tokens=max(8192, seats),
            enable_prefix_caching=prefix_cache,
        )
        self.chance = random.Random(1)
        self.kv = KVCacheManager(num_blocks + 1, BLOCK_SIZE, prefix_caching=prefix_cache)
        waiting = make_waiting_room(config, self.kv)
        self.scheduler = Scheduler(config, self.kv, make_batch_policy(config), waiting)
        self.shared = self.chance.choices(range(50_000), k=SHARED_PROMPT)
        self.running = running
        self.uid = 0

    def new_request(self, max_tokens: int, prompt: int = PROMPT) -> Request:
        own = self.chance.choices(range(50_000), k=prompt - SHARED_PROMPT)
        self.uid += 1
        params = SamplingParams(max_tokens=max_tokens)
        return Request(self.uid, self.shared + own, params, seed=0, arrival=float(self.uid))

    def answer_length(self) -> int:
        return 1 + min(1000, int(self.chance.expovariate(1 / MEAN_ANSWER)))

    def fill(self, max_tokens: Callable[[], int]) -> None:
        for _ in range(self.running):
            self.scheduler.add(self.new_request(max_tokens()))
        plan = self.scheduler.schedule(0.0)
        while plan.prefills:
            self.scheduler.finish_running(self.advance(plan))
            plan = self.scheduler.schedule(0.0)
        self.scheduler.finish_running(self.advance(plan))

    def advance(self, plan: StepPlan) -> set[int]:
        """Append what the model would; returns who has finished."""
        finished = set()
        for row in plan.rows:
            request = row.request
            if request.num_computed == request.num_tokens:
                request.append_output(self.chance.randrange(50_000))
                if len(request.output_ids) >= request.params.max_tokens:
                    finished.add(request.uid)
        return finished


def steady(running: int, waiting: int, steps: int, *, prefix_cache: bool) -> Cost:
    num_blocks = running * (1 + (PROMPT + steps + 300) // BLOCK_SIZE) + 10
    load = Load(running, num_blocks, prefix_cache=prefix_cache, seats=running)
    load.fill(lambda: steps + 250)
    for _ in range(waiting):
        load.scheduler.add(load.new_request(64))
    return measure("steady", load, waiting, steps)


def blocked(running: int, waiting: int, steps: int, *, prefix_cache: bool) -> Cost:
    """Free seats, and at the head of the queue prompts that need the whole pool."""
    num_blocks = running * (1 + (PROMPT + steps + 300) // BLOCK_SIZE) + 10
    load = Load(running, num_blocks, prefix_cache=prefix_cache, seats=running + 8)
    load.fill(lambda: steps + 250)
    for index in range(waiting):
        prompt = (num_blocks - 1) * BLOCK_SIZE if index < 16 else PROMPT
        load.scheduler.add(load.new_request(BLOCK_SIZE, prompt))
    return measure("blocked", load, waiting, steps)


def measure(scenario: str, load: Load, waiting: int, steps: int) -> Cost:
    times = []
    for _ in range(steps):
        started = time.thread_time_ns()
        plan = load.scheduler.schedule(0.0)
        times.append(time.thread_time_ns() - started)
        assert len(plan.decodes) == load.running, "the scenario is not what it should be"
        load.advance(plan)
    return cost(scenario, load, waiting, times)


def churn(running: int, waiting: int, steps: int, *, prefix_cache: bool, tight: bool) -> Cost:
    per_request = -(-(PROMPT + MEAN_ANSWER) // BLOCK_SIZE)
    num_blocks = max(100, running * per_request * 3 // 4 if tight else running * 80)
    load = Load(running, num_blocks, prefix_cache=prefix_cache, seats=running)
    load.fill(load.answer_length)
    for _ in range(waiting):
        load.scheduler.add(load.new_request(load.answer_length()))
    times = []
    finished: set[int] = set()
    for step in range(steps + 30):
        arrivals = [load.new_request(load.answer_length()) for _ in finished]
        started = time.thread_time_ns()
        load.scheduler.finish_running(finished)
        for request in arrivals:
            load.scheduler.add(request)
        plan = load.scheduler.schedule(0.0)
        if step >= 30:
            times.append(time.thread_time_ns() - started)
        finished = load.advance(plan)
    return cost("churn, tight" if tight else "churn, roomy", load, waiting, times)


def cost(scenario: str, load: Load, waiting: int, times: list[int]) -> Cost:
    median = statistics.median(times) / 1000
    rows = max(1, len(load.scheduler.running))
    return Cost(scenario, load.kv.prefix_caching, rows, waiting, median, median / rows)


def all_costs(steps: int, rows: tuple[int, ...], waiting: tuple[int, ...]) -> list[Cost]:
    costs = []
    for prefix_cache in (True, False):
        for running in rows:
            for queue in waiting:
                costs.append(steady(running, queue, steps, prefix_cache=prefix_cache))
                if queue:
                    costs.append(blocked(running, queue, steps, prefix_cache=prefix_cache))
            for tight in (False, True):
                costs.append(
                    churn(running, waiting[-1], steps, prefix_cache=prefix_cache, tight=tight)
                )
    return costs


def show(costs: list[Cost]) -> None:
    table = Table(title="Scheduler: CPU microseconds, medians")
    for heading in ("scenario", "prefix cache", "running", "waiting", "per step", "per row"):
        table.add_column(heading, justify="left" if heading == "scenario" else "right")
    for one in sorted(costs, key=lambda c: (c.scenario, not c.prefix_cache, c.running, c.waiting)):
        table.add_row(
            one.scenario,
            "on" if one.prefix_cache else "off",
            f"{one.running:,}",
            f"{one.waiting:,}",
            f"{one.us_per_step:,.1f}",
            f"{one.us_per_row:.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="steps measured per scenario")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    gc.disable()
    rows, waiting = ((64, 1024), (0, 10_000)) if args.quick else (ROWS, WAITING)
    costs = all_costs(args.steps, rows, waiting)
    show(costs)
    if args.json:
        args.json.write_text(json.dumps([one._asdict() for one in costs], indent=1) + "\n")


if __name__ == "__main__":
    main()
