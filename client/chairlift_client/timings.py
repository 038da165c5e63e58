"""What a client saw of its requests, and the figures that are drawn from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Arrival(NamedTuple):
    """Tokens that reached the client together; ``time`` in seconds of the client's clock."""

    time: float
    tokens: int


@dataclass(slots=True)
class Trace:
    """One request as its client saw it; ``sent`` in seconds of the same clock as the arrivals."""

    sent: float
    num_prompt_tokens: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    error: str | None = None
    request_id: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(arrival.tokens for arrival in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None for a request that got none."""
        return self.arrivals[0].time - self.sent if self.arrivals else None

    @property
    def latency(self) -> float | None:
        """Seconds to the last token; None for a request that got none."""
        return self.arrivals[-1].time - self.sent if self.arrivals else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals: tokens that come together are one arrival."""
        times = [arrival.time for arrival in self.arrivals]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    @property
    def time_per_token(self) -> float | None:
        """Seconds per token after the first arrival; None where nothing came after it."""
        if len(self.arrivals) < 2:
            return None
        after_first = self.num_tokens - self.arrivals[0].tokens
        return (self.arrivals[-1].time - self.arrivals[0].time) / after_first


class Objective(NamedTuple):
    """A service level: limits in seconds for a request's first token and its time per token."""

    ttft: float | None = None
    itl: float | None = None

    @classmethod
    def of_milliseconds(cls, ttft: float | None, itl: float | None) -> Objective:
        """The same limits in the unit that people state them in."""
        return cls(*(None if limit is None else limit / 1e3 for limit in (ttft, itl)))

    def is_met_by(self, trace: Trace) -> bool:
        """Whether the request succeeded within the limits that are set."""
        if trace.error is not None or trace.ttft is None:
            return False
        if self.ttft is not None and trace.ttft > self.ttft:
            return False
        pace = trace.time_per_token
        return self.itl is None or pace is None or pace <= self.itl


ANY_TIME = Objective()


class Spread(NamedTuple):
    """How a quantity is distributed, in its own unit."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


class Summary(NamedTuple):
    """The figures of one run; times in seconds, rates per second of ``duration``.

    ``goodput`` is the rate of requests that met the objective. A spread is None where there was
    nothing to measure.
    """

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_tokens: int
    duration: float
    tokens_per_second: float
    requests_per_second: float
    goodput: float
    num_good: int
    ttft: Spread | None
    itl: Spread | None
    time_per_token: Spread | None
    latency: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    """Mean, percentiles (linear between neighbours) and maximum; None for no values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return Spread(float(np.mean(values)), float(p50), float(p90), float(p99), max(values))


def summarize(traces: Sequence[Trace], objective: Objective = ANY_TIME) -> Summary:
    """The figures of a run, from the first request sent to the last token received."""
    done = [trace for trace in traces if trace.error is None and trace.arrivals]
    first = min((trace.sent for trace in traces), default=0.0)
    last = max((trace.arrivals[-1].time for trace in traces if trace.arrivals), default=first)
    duration = last - first
    num_tokens = sum(trace.num_tokens for trace in traces)
    num_good = sum(objective.is_met_by(trace) for trace in done)

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        num_requests=len(traces),
        num_failed=len(traces) - len(done),
        num_prompt_tokens=sum(trace.num_prompt_tokens for trace in traces),
        num_tokens=num_tokens,
        duration=duration,
        tokens_per_second=rate(num_tokens),
        requests_per_second=rate(len(done)),
        goodput=rate(num_good),
        num_good=num_good,
        ttft=spread(_present(trace.ttft for trace in done)),
        itl=spread([gap for trace in done for gap in trace.gaps]),
        time_per_token=spread(_present(trace.time_per_token for trace in done)),
        latency=spread(_present(trace.latency for trace in done)),
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
