"""Figures of one run, medians over rounds, and ratios taken within each round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from chairlift_client.timings import Spread, summarize

from .peer_process import Run


class Figures(NamedTuple):
    """One run of one workload; milliseconds, tokens per second, seconds of processor time, MiB."""

    seconds: float
    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    ms_per_token: float
    cpu_seconds: float
    driver_cpu_seconds: float
    peak_rss_mib: float


class Ratio(NamedTuple):
    """A quotient of two engines' figures: the median over rounds, and its range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def figures(run: Run) -> Figures:
    """What a run amounts to. ``ms_per_token`` is the pace after a request's first token."""
    summary = summarize(run.traces)

    def ms(spread: Spread | None, pick: Callable[[Spread], float]) -> float:
        return pick(spread) * 1e3 if spread else 0.0

    return Figures(
        seconds=summary.duration,
        tokens_per_second=summary.tokens_per_second,
        ttft_p50_ms=ms(summary.ttft, lambda s: s.p50),
        ttft_p99_ms=ms(summary.ttft, lambda s: s.p99),
        itl_p50_ms=ms(summary.itl, lambda s: s.p50),
        itl_p99_ms=ms(summary.itl, lambda s: s.p99),
        ms_per_token=ms(summary.time_per_token, lambda s: s.mean),
        cpu_seconds=run.cpu,
        driver_cpu_seconds=run.driver_cpu,
        peak_rss_mib=run.peak_rss_bytes / 2**20,
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds by itself."""
    return Figures(*(median(column) for column in zip(*rounds, strict=True)))


def ratio(
    over: Mapping[int, Figures], under: Mapping[int, Figures], pick: Callable[[Figures], float]
) -> Ratio | None:
    """The quotient in every round that both have; None without such a round."""
    quotients = [pick(over[r]) / pick(under[r]) for r in over if r in under and pick(under[r])]
    if not quotients:
        return None
    return Ratio(median(quotients), min(quotients), max(quotients))
