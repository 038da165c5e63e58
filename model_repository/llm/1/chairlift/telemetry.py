"""Turns what was observed into metrics and log lines; runs in the housekeeping thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .answers import RequestRecord
from .errors import ErrorCode
from .metric_names import own, trtllm, vllm
from .metrics import MetricBook
from .observations import Ended, FirstToken, Observations, taken
from .request_log import RequestLog
from .step_outputs import StepStats

# Steps that the heartbeat shows.
STEPS_SHOWN = 16
NO_STEP = StepStats(*([0] * len(StepStats._fields)))


class EngineFigures(NamedTuple):
    """Where the engine is now; preemptions, evictions, and compiled kernels since its start."""

    state: str
    beat_age: float
    num_open: int
    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_cached: int
    num_preemptions: int
    num_evictions: int
    num_compiled: int
    process_bytes: int
    device_bytes: int


class EngineLimits(NamedTuple):
    """What does not change while the engine lives."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_tenants: int


class Tenants:
    """Names the first ``limit`` tenants and lumps together the rest, so that clients who make up
    tenants cannot make up time series."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: set[str] = set()

    def label(self, tenant: str) -> str:
        if not tenant:
            return own.NO_TENANT
        if tenant not in self._known:
            if len(self._known) >= self._limit:
                return own.OTHER_TENANTS
            self._known.add(tenant)
        return tenant


class Telemetry:
    """Empties the observations, fills the book, and writes a line for each request that ended."""

    def __init__(
        self,
        observations: Observations,
        read: Callable[[], EngineFigures],
        limits: EngineLimits,
        *,
        book: MetricBook | None,
        log: RequestLog,
        wall_clock: Callable[[], float],
    ) -> None:
        self._recent: deque[StepStats] = deque(maxlen=STEPS_SHOWN)
        self._seen = observations
        self._read = read
        self._limits = limits
        self._book = book
        self._log = log
        self._wall_clock = wall_clock
        self._tenants = Tenants(limits.max_tenants)
        self._totals: dict[str, int] = {}
        self._num_steps = 0
        self._num_reused_blocks = 0

    def flush(self) -> None:
        """Take what was observed since the last time and send it on.

        The timestamp goes last: whoever reads it knows that all before it has been counted.
        """
        taken_at = self._wall_clock()
        steps, ended = taken(self._seen.steps), taken(self._seen.ended)
        gaps, first_tokens = taken(self._seen.gaps), taken(self._seen.first_tokens)
        refused = taken(self._seen.refused)
        self._recent.extend(steps)
        self._num_steps += len(steps)
        for item in ended:
            self._log.ended(item)
        if self._book is None:
            return
        self._count_tokens(self._book, gaps, first_tokens)
        self._count_ended(self._book, ended, refused)
        now = self._read()
        self._count_steps(self._book, steps)
        if steps or not now.num_running:
            _show_step(self._book, steps[-1] if steps else NO_STEP)
        self._set_levels(self._book, now)
        self._book.set(trtllm.GENERAL, int(taken_at * 1e6), "timestamp")
        self._book.push()

    def recent_steps(self) -> list[tuple[int, int, float]]:
        """Of the last steps: decode rows, prompt tokens, milliseconds."""
        return [
            (s.num_decodes, s.num_prefill_tokens, round((s.finished - s.started) * 1e3, 2))
            for s in self._recent
        ]

    # ---------------------------------------------------------------- tokens and requests

    def _count_tokens(
        self, book: MetricBook, gaps: Sequence[float], first_tokens: Sequence[FirstToken]
    ) -> None:
        book.count(vllm.GENERATION_TOKENS, self._grown("tokens", self._seen.num_tokens))
        book.count(own.WASTED, self._grown("overrun", self._seen.num_overrun), "overrun")
        book.observe(vllm.INTER_TOKEN, gaps)
        book.observe(vllm.PER_OUTPUT_TOKEN, gaps)
        book.observe(vllm.FIRST_TOKEN, [first.seconds for first in first_tokens])
        for first in first_tokens:
            book.count(vllm.PROMPT_TOKENS, first.num_prompt_tokens)
            book.count(vllm.CACHED_TOKENS, first.num_cached_tokens)
            book.count(vllm.PREFIX_QUERIES, first.num_prompt_tokens)
            book.count(vllm.PREFIX_HITS, first.num_cached_tokens)
            tenant = self._tenants.label(first.tenant)
            book.count(own.TENANT_PROMPT, first.num_prompt_tokens, tenant)
            self._num_reused_blocks += first.num_cached_tokens // self._limits.block_size

    def _count_ended(
        self, book: MetricBook, ended: Sequence[Ended], refused: Sequence[ErrorCode]
    ) -> None:
        for refusal in refused:
            book.count(own.REFUSED, 1, refusal.value.lower())
        for record, _, code, _ in ended:
            tenant = self._tenants.label(record.tenant)
            book.count(own.TENANT_OUTPUT, record.num_output_tokens, tenant)
            for reason in record.finish_reasons:
                book.count(vllm.SUCCESS, 1, reason)
            if code is None:
                _observe_finished(book, record)
                continue
            cut_off = record.num_samples - len(record.finish_reasons)
            book.count(vllm.SUCCESS, cut_off, "abort" if code is ErrorCode.CANCELLED else "error")
            book.count(own.WASTED, record.num_output_tokens, "aborted")

    # ---------------------------------------------------------------- steps and levels

    def _count_steps(self, book: MetricBook, steps: Sequence[StepStats]) -> None:
        book.observe(vllm.STEP_TOKENS, [s.num_decodes + s.num_prefill_tokens for s in steps])
        book.observe(own.STEP_SECONDS, [s.finished - s.started for s in steps])
        book.observe(own.STEP_ROWS, [s.num_decodes + s.num_prefills for s in steps])
        book.count(own.SCHEDULE_SECONDS, sum(s.scheduled - s.started for s in steps))
        for step in steps:
            prefill = "mixed" if step.num_decodes else "prefill"
            book.count(own.STEPS, 1, prefill if step.num_prefill_tokens else "decode")
            book.count(own.STEP_TOKENS, step.num_decodes, "decode")
            book.count(own.STEP_TOKENS, step.num_prefill_tokens, "prefill")
            book.count(own.WASTED, step.num_recomputed_tokens, "recomputed")

    def _set_levels(self, book: MetricBook, now: EngineFigures) -> None:
        usage = now.blocks_used / self._limits.num_blocks
        book.set(vllm.RUNNING, now.num_running)
        book.set(vllm.WAITING, now.num_waiting)
        book.set(vllm.KV_USAGE, usage)
        book.count(vllm.PREEMPTIONS, self._grown("preemptions", now.num_preemptions))
        for state in own.STATES:
            book.set(own.STATE, float(state == now.state), state)
        book.set(own.BEAT_AGE, now.beat_age)
        book.set(own.OPEN, now.num_open)
        book.set(own.CACHED_BLOCKS, now.blocks_cached)
        book.count(own.EVICTIONS, self._grown("evictions", now.num_evictions))
        book.count(own.COMPILED, self._grown("compiled", now.num_compiled))
        self._set_trtllm(book, now, usage)

    def _set_trtllm(self, book: MetricBook, now: EngineFigures, usage: float) -> None:
        limits = self._limits
        for value, level in (
            ("active", now.num_running + now.num_waiting),
            ("max", limits.max_num_seqs),
            ("waiting", now.num_waiting),
        ):
            book.set(trtllm.REQUESTS, level, value)
        for value, blocks in (
            ("max", limits.num_blocks),
            ("free", limits.num_blocks - now.blocks_used),
            ("used", now.blocks_used),
            ("tokens_per", limits.block_size),
            ("reused", self._num_reused_blocks),
            ("fraction", usage),
        ):
            book.set(trtllm.KV_BLOCKS, blocks, value)
        book.set(trtllm.RUNTIME_MEMORY, now.process_bytes, "cpu")
        book.set(trtllm.RUNTIME_MEMORY, now.device_bytes, "gpu")
        book.set(trtllm.GENERAL, self._num_steps, "iteration_counter")

    def _grown(self, name: str, total: int) -> int:
        """How much a running total has grown since this was last asked."""
        before = self._totals.get(name, 0)
        self._totals[name] = total
        return total - before


def _show_step(book: MetricBook, step: StepStats) -> None:
    """The composition of the last step; nothing where the engine rests."""
    book.set(own.LAST_STEP, step.num_decodes, "decode")
    book.set(own.LAST_STEP, step.num_prefills, "prefill")
    book.set(trtllm.INFLIGHT_BATCHER, step.num_prefill_tokens, "total_context_tokens")
    book.set(trtllm.INFLIGHT_BATCHER, step.num_decodes, "generation_requests")
    book.set(trtllm.INFLIGHT_BATCHER, step.num_preempted, "paused_requests")
    book.set(trtllm.REQUESTS, step.num_decodes + step.num_prefills, "scheduled")
    book.set(trtllm.REQUESTS, step.num_prefills, "context")


def _observe_finished(book: MetricBook, record: RequestRecord) -> None:
    """The histograms of a request that went well, so its times are all known."""
    book.observe(vllm.REQUEST_PROMPT, [record.num_prompt_tokens])
    book.observe(vllm.REQUEST_GENERATION, [record.num_output_tokens])
    book.observe(vllm.REQUEST_COMPUTED, [record.num_prompt_tokens - record.num_cached_tokens])
    book.observe(vllm.PARAMS_N, [record.num_samples])
    book.observe(vllm.PARAMS_MAX_TOKENS, [record.max_tokens])
    book.observe(trtllm.INPUT_LENGTH, [record.num_prompt_tokens])
    book.observe(trtllm.OUTPUT_LENGTH, [record.num_output_tokens])
    scheduled, first, last = record.first_scheduled, record.first_token, record.last_token
    if scheduled is None or first is None or last is None:
        return
    book.observe(vllm.QUEUE_TIME, [scheduled - record.arrival])
    book.observe(vllm.PREFILL_TIME, [first - scheduled])
    book.observe(vllm.DECODE_TIME, [last - first])
    book.observe(vllm.INFERENCE_TIME, [last - scheduled])
    book.observe(vllm.LATENCY, [last - record.arrival])
    after_first = record.num_output_tokens / record.num_samples - 1
    if after_first > 0:
        book.observe(vllm.REQUEST_PER_TOKEN, [(last - first) / after_first])
