"""Counts on their way to /metrics: gathered here, sent in few calls.

Each call on a Triton metric is a round trip between processes (20 us, on a busy machine 130), so
counters travel as sums and gauges only when they change. All of it happens in one thread.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

from .metric_names import ALL, Kind, Spec

logger = logging.getLogger(__name__)


class Series(Protocol):
    """One time series; a counter increments, a gauge is set, a histogram observes."""

    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class Sink(Protocol):
    """A server's metrics. Raises whatever the server raises, where it has them switched off."""

    has_histograms: bool

    def series(
        self, name: str, kind: Kind, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Series: ...


class BucketCounters:
    """A histogram written as the counters ``_bucket``, ``_sum``, and ``_count``.

    A scrape reads the same series as from a real one; only the TYPE line says counter. Triton's
    histograms take one value per call, which for one per token and 6,000 tokens a second would keep
    the server busy for an eighth of its time; these take any number of values in 30 calls.
    """

    def __init__(self, sink: Sink, spec: Spec, labels: Mapping[str, str]) -> None:
        def series(part: str, extra: Mapping[str, str]) -> Series:
            name = f"{spec.name}_{part}"
            return sink.series(name, Kind.COUNTER, spec.help, {**labels, **extra}, ())

        self._bounds = spec.buckets
        self._buckets = [series("bucket", {"le": _bound(b)}) for b in (*spec.buckets, math.inf)]
        self._sum = series("sum", {})
        self._count = series("count", {})

    def observe_all(self, values: Sequence[float]) -> None:
        counts = [0] * len(self._buckets)
        for value in values:
            counts[bisect_left(self._bounds, value)] += 1
        for bucket, cumulative in zip(self._buckets, accumulate(counts), strict=True):
            if cumulative:
                bucket.increment(cumulative)
        self._sum.increment(max(0.0, sum(values)))
        self._count.increment(len(values))


class NativeHistogram:
    """A histogram of the server's own."""

    def __init__(self, sink: Sink, spec: Spec, labels: Mapping[str, str]) -> None:
        self._series = sink.series(spec.name, spec.kind, spec.help, labels, spec.buckets)

    def observe_all(self, values: Sequence[float]) -> None:
        for value in values:
            self._series.observe(value)


def _bound(bound: float) -> str:
    """As Prometheus writes a bucket's upper bound."""
    if math.isinf(bound):
        return "+Inf"
    return str(int(bound)) if bound.is_integer() else repr(bound)


class MetricBook:
    """All series of one model. A call that fails ends its family, never a request.

    Raises what the sink raises, where the server has no metrics.
    """

    def __init__(self, sink: Sink, labels: Mapping[str, str], specs: Iterable[Spec] = ALL) -> None:
        self._sink = sink
        self._labels = dict(labels)
        self._series: dict[tuple[Spec, str], Series] = {}
        self._histograms: dict[Spec, BucketCounters | NativeHistogram] = {}
        self._amounts: dict[tuple[Spec, str], float] = {}
        self._levels: dict[tuple[Spec, str], float] = {}
        self._shown: dict[tuple[Spec, str], float] = {}
        self._observed: dict[Spec, list[float]] = {}
        self._failed: set[Spec] = set()
        for spec in specs:
            self._declare(spec)

    def count(self, spec: Spec, amount: float, value: str = "") -> None:
        """Add to a counter; what would take it back is dropped, as the server refuses it."""
        if amount > 0 and spec not in self._failed:
            key = (spec, value)
            self._amounts[key] = self._amounts.get(key, 0.0) + amount

    def set(self, spec: Spec, level: float, value: str = "") -> None:
        """Set a gauge."""
        if spec not in self._failed:
            self._levels[spec, value] = level

    def observe(self, spec: Spec, values: Sequence[float]) -> None:
        """Add values to a histogram."""
        if values and spec not in self._failed:
            self._observed.setdefault(spec, []).extend(values)

    def info(self, spec: Spec, labels: Mapping[str, str]) -> None:
        """Set a gauge that is always 1 and says everything in its labels."""
        with self._guarded(spec):
            self._series[spec, ""] = self._new(spec, {**self._labels, **labels})
        self.set(spec, 1.0)

    def push(self) -> None:
        """Send what has gathered; levels last and in the order in which they were set."""
        amounts, self._amounts = self._amounts, {}
        for (spec, value), amount in amounts.items():
            with self._guarded(spec):
                self._of(spec, value).increment(amount)
        observed, self._observed = self._observed, {}
        for spec, values in observed.items():
            with self._guarded(spec):
                self._histograms[spec].observe_all(values)
        levels, self._levels = self._levels, {}
        for (spec, value), level in levels.items():
            if self._shown.get((spec, value)) != level:
                self._shown[spec, value] = level
                with self._guarded(spec):
                    self._of(spec, value).set(level)

    @contextmanager
    def _guarded(self, spec: Spec) -> Iterator[None]:
        try:
            yield
        except Exception:
            logger.exception("metric %s failed and is given up", spec.name)
            self._failed.add(spec)

    def _declare(self, spec: Spec) -> None:
        """Make the series that are known from the start; a counter's show 0."""
        if spec.kind is Kind.HISTOGRAM:
            labels = self._labels_of(spec, *spec.values)
            native = self._sink.has_histograms and not spec.dense
            writer = NativeHistogram if native else BucketCounters
            self._histograms[spec] = writer(self._sink, spec, labels)
            return
        for value in spec.values if spec.label else ("",):
            self._of(spec, value)

    def _of(self, spec: Spec, value: str) -> Series:
        series = self._series.get((spec, value))
        if series is None:
            series = self._series[spec, value] = self._new(spec, self._labels_of(spec, value))
        return series

    def _labels_of(self, spec: Spec, value: str = "") -> dict[str, str]:
        return {**self._labels, spec.label: value} if spec.label else self._labels

    def _new(self, spec: Spec, labels: Mapping[str, str]) -> Series:
        return self._sink.series(spec.name, spec.kind, spec.help, labels, ())
