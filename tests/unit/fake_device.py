"""A device that computes only when it is waited for, in the order of the launches.

Its cache holds a token per slot. What it draws for a row is a function of the request's seed and of
all tokens that the row's block table leads to, so a wrong block, a token that is missing, or one
that came too late gives another text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from chairlift.config import EngineConfig
from chairlift.engine import Engine
from chairlift.kv_cache import NULL_BLOCK, KVCacheManager
from chairlift.kv_in_flight import InFlightKVCache
from chairlift.model_runner import Sample, StepResult
from chairlift.policies import make_batch_policy
from chairlift.request import Request, SamplingParams
from chairlift.scheduler import Scheduler, StepPlan
from chairlift.step_outputs import Outputs, PromptOut, TokenOut
from chairlift.waiting_room import make_waiting_room

ALPHABET = 50
EOS = frozenset({3})


class OutOfMemoryError(RuntimeError):
    pass


class Fault(NamedTuple):
    """What goes wrong in one step, and when the host hears of it."""

    where: Literal["launch", "wait", "nan"]
    error: Exception


class DeviceRow(NamedTuple):
    """What the device is given: ``tokens`` lacks the one that the step before draws."""

    request: Request
    table: list[int]
    start: int
    tokens: list[int]
    promised: bool
    samples: range


@dataclass
class Launched:
    """A step on its way; ``result`` is there once the device has come to it."""

    device: FakeDevice
    number: int
    copies: list[tuple[int, int]]
    rows: list[DeviceRow]
    fault: Fault | None
    result: StepResult | None = None
    error: Exception | None = None

    def wait(self) -> StepResult:
        self.device.compute_up_to(self.number)
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class FakeDevice:
    """A runner for the engine."""

    def __init__(self, kv: KVCacheManager, num_blocks: int) -> None:
        self._kv = kv
        self._size = kv.block_size
        self._slots: list[int | None] = [None] * (num_blocks * kv.block_size)
        self._queue: list[Launched] = []
        self._drawn: dict[int, int] = {}
        self.num_launched = 0
        self.num_promised = 0
        self.most_in_flight = 0
        self.faults: dict[int, Fault] = {}
        self.released: list[int] = []

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).wait()

    def launch(self, plan: StepPlan) -> Launched:
        number, self.num_launched = self.num_launched, self.num_launched + 1
        rows = [self._row(row.request, row.start, row.num_tokens) for row in plan.rows]
        # One token can't be retried in a smaller step: such a step is spared.
        fault = self.faults.get(number) if plan.num_tokens > 1 else None
        if fault is not None and fault.where == "launch":
            raise fault.error
        launched = Launched(self, number, [tuple(copy) for copy in plan.copies], rows, fault)
        self._queue.append(launched)
        self.most_in_flight = max(self.most_in_flight, len(self._queue))
        return launched

    def release(self, request: Request) -> None:
        self.released.append(request.uid)

    def _row(self, request: Request, start: int, num_tokens: int) -> DeviceRow:
        end = start + num_tokens
        known = request.token_ids[start:end]
        assert len(known) >= num_tokens - 1
        assert NULL_BLOCK not in request.block_ids
        forks = request.params.n if not request.output_ids and request.sample_index == 0 else 1
        first = request.sample_index
        samples = range(first, first + forks) if end == request.num_tokens else range(0)
        promised = len(known) < num_tokens
        self.num_promised += promised
        return DeviceRow(request, list(request.block_ids), start, known, promised, samples)

    # ---------------------------------------------------------------- the device's side

    def compute_up_to(self, number: int) -> None:
        while self._queue and self._queue[0].number <= number:
            self._compute(self._queue.pop(0))

    def _compute(self, step: Launched) -> None:
        for row in step.rows:
            held = [self._kv.num_sharers(block) for block in row.table]
            assert all(held), "a block was given up while a step in flight uses it"
        size, slots = self._size, self._slots
        for source, target in step.copies:
            slots[target * size : (target + 1) * size] = slots[source * size : (source + 1) * size]
        fault = step.fault
        for row in step.rows:
            tokens: list[int | None] = [*row.tokens]
            if row.promised:
                tokens.append(self._drawn.get(row.request.uid))
            for offset, token in enumerate(tokens):
                failed = fault is not None and fault.where == "wait"
                slots[self._slot(row, row.start + offset)] = None if failed else token
        if fault is not None and fault.where == "wait":
            step.error = fault.error
            self._drawn = {}
            return
        samples = [self._draw(row, index) for row in step.rows for index in row.samples]
        self._drawn = {s.request.uid: s.token_id for s in samples}
        if fault is not None and samples:
            samples[0] = samples[0]._replace(invalid=True)
        step.result = StepResult(samples, [])

    def _slot(self, row: DeviceRow, position: int) -> int:
        return row.table[position // self._size] * self._size + position % self._size

    def _draw(self, row: DeviceRow, index: int) -> Sample:
        length = row.start + len(row.tokens) + row.promised
        read = [self._slots[self._slot(row, position)] for position in range(length)]
        assert None not in read or self.faults, "reads what nobody has written"
        where = repr((row.request.seed, index, read))
        return Sample(row.request, index, random.Random(where).randrange(ALPHABET), None, False)


@dataclass
class Text:
    """What a client got for one request: tokens by sample, and how each ended."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finals: list[str] = field(default_factory=list)
    error: str = ""
    num_cached: int = field(default=0, compare=False)


class AheadWorld:
    """An engine over a fake device, one step ahead or not, driven in the test's own thread."""

    def __init__(self, ahead: bool, num_blocks: int, block_size: int = 4, **settings: Any) -> None:
        self.now = 0.0
        self.texts: dict[int, Text] = {}
        config = EngineConfig.model_validate({"max_num_seqs": 8} | settings)
        books = InFlightKVCache if ahead else KVCacheManager
        self.kv = books(num_blocks + 1, block_size, prefix_caching=config.enable_prefix_caching)
        self.scheduler = Scheduler(
            config, self.kv, make_batch_policy(config), make_waiting_room(config, self.kv)
        )
        self.device = FakeDevice(self.kv, num_blocks + 1)
        self.engine = Engine(
            self.scheduler,
            self.device,
            self._take,
            lambda: self.now,
            max_waiting=1000,
            one_step_ahead=ahead,
        )

    def _take(self, outputs: Outputs) -> None:
        for out in outputs:
            text = self.texts[out.group]
            if isinstance(out, TokenOut):
                assert not text.error, "a token after the error"
                text.tokens.setdefault(out.sample_index, []).append(out.token_id)
                if out.finish is not None:
                    text.finals.append(f"{out.sample_index} {out.finish.value}")
            elif isinstance(out, PromptOut):
                text.num_cached = out.num_cached
            else:
                assert not text.error, "two errors for one request"
                text.error = out.message

    def submit(self, uid: int, prompt: list[int], params: SamplingParams, **fields: Any) -> None:
        self.texts[uid] = Text()
        fields.setdefault("eos_ids", EOS)
        self.engine.submit([Request(uid, prompt, params, uid, self.now, **fields)])

    def step(self) -> bool:
        self.now += 0.01
        self.engine._take_commands()
        progressed = self.engine._step()
        self.kv.check_integrity([*self.scheduler.running, *self.scheduler.waiting])
        return progressed

    def run(self, each_step: Callable[[], None] = lambda: None) -> None:
        for _ in range(5000):
            progressed = self.step()
            each_step()
            if not progressed and not self.scheduler.num_unfinished:
                assert self.kv.num_used == 0
                assert not self.engine._collector.groups
                return
        raise AssertionError("requests are left")
