"""Measure a running server: send requests at a pace, and put what came back into a table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.table import Table

from chairlift_client.load import (
    LoadClient,
    LoadRequest,
    closed_loop,
    open_loop,
    poisson_offsets,
)
from chairlift_client.stream import Endpoint, Value
from chairlift_client.timings import Objective, Spread, Summary, Trace, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``concurrency`` requests at any time, or Poisson arrivals of ``rate`` per second if set."""

    concurrency: int = 16
    rate: float | None = None
    seed: int = 0


class Measurement(NamedTuple):
    """What a run amounts to, and the processor seconds that the load client itself took."""

    summary: Summary
    client_cpu: float
    errors: list[str]


class Target(NamedTuple):
    """The model that is measured, over how many gRPC streams, and inputs common to all requests."""

    endpoint: Endpoint
    model: str
    num_streams: int = 1
    extra_inputs: Mapping[str, Value] = MappingProxyType({})

    def connect(self, on_ended: Callable[[], None] = lambda: None) -> LoadClient:
        """A client with its streams open. Raises GenerateError where nobody answers."""
        return LoadClient(
            self.endpoint,
            self.model,
            time.perf_counter,
            num_streams=self.num_streams,
            extra_inputs=self.extra_inputs,
            on_ended=on_ended,
        )


def measure(
    target: Target,
    requests: Sequence[LoadRequest],
    pace: Pace,
    objective: Objective,
    *,
    on_ended: Callable[[], None] = lambda: None,
) -> Measurement:
    """Send all requests at the pace and wait for them. Raises GenerateError for no such server."""
    with target.connect(on_ended) as client:
        cpu = time.process_time()
        traces = _send(client, requests, pace)
        cpu = time.process_time() - cpu
    errors = sorted({trace.error for trace in traces if trace.error is not None})
    return Measurement(summarize(traces, objective), cpu, errors)


def _send(client: LoadClient, requests: Sequence[LoadRequest], pace: Pace) -> list[Trace]:
    if pace.rate is None:
        return closed_loop(client, requests, pace.concurrency)
    offsets = poisson_offsets(pace.rate, len(requests), random.Random(pace.seed))
    return open_loop(client, requests, offsets, time.perf_counter, time.sleep)


def result_table(measurement: Measurement, objective: Objective) -> Table:
    """The figures as a table for people; times in milliseconds."""
    summary = measurement.summary
    table = Table(title="chairlift bench", title_justify="left")
    table.add_column("milliseconds")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    rows: list[tuple[str, Spread | None]] = [
        ("time to first token", summary.ttft),
        ("between tokens (ITL)", summary.itl),
        ("per token of a request", summary.time_per_token),
        ("whole answer", summary.latency),
    ]
    for name, values in rows:
        table.add_row(name, *(["-"] * 5 if values is None else [f"{v * 1e3:.1f}" for v in values]))
    table.caption = "\n".join(_facts(measurement, objective))
    table.caption_justify = "left"
    return table


def _facts(measurement: Measurement, objective: Objective) -> list[str]:
    summary = measurement.summary
    done = summary.num_requests - summary.num_failed
    lines = [
        f"requests     {done} done, {summary.num_failed} failed, in {summary.duration:.2f} s",
        f"tokens       {summary.num_prompt_tokens} in, {summary.num_tokens} out",
        f"throughput   {summary.tokens_per_second:.1f} output tokens/s, "
        f"{summary.requests_per_second:.2f} requests/s",
    ]
    if objective != Objective():
        limits = [
            f"{name} {limit * 1e3:.0f} ms"
            for name, limit in (("first token", objective.ttft), ("per token", objective.itl))
            if limit is not None
        ]
        lines.append(
            f"goodput      {summary.goodput:.2f} requests/s: {summary.num_good} of "
            f"{summary.num_requests} within {', '.join(limits)}"
        )
    lines.append(f"this client  {measurement.client_cpu:.2f} s of processor time")
    return lines


def as_json(measurement: Measurement) -> dict[str, Any]:
    """Everything that was measured, in seconds, for other programs."""
    summary = {
        name: value._asdict() if isinstance(value, Spread) else value
        for name, value in measurement.summary._asdict().items()
    }
    return {**summary, "client_cpu": measurement.client_cpu, "errors": measurement.errors}
