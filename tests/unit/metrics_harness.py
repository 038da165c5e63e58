"""A stand-in for tritonserver's metrics, as strict as it is, and stand-ins for what is observed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from chairlift.answers import RequestRecord
from chairlift.calls import TextPrompt
from chairlift.metric_names import Kind
from chairlift.step_outputs import StepStats
from chairlift_client.scrape import Scrape


class FakeSeries:
    """Counts calls; does what its kind can, refuses the rest as the server does."""

    def __init__(self, sink: FakeSink, kind: Kind, buckets: Sequence[float]) -> None:
        self.sink = sink
        self.kind = kind
        self.value = 0.0
        self.bounds = [*buckets, math.inf]
        self.counts = [0] * len(self.bounds)

    def increment(self, value: float) -> None:
        self.sink.called(self, self.kind in (Kind.COUNTER, Kind.GAUGE))
        assert self.kind is Kind.GAUGE or value >= 0, "a counter only grows"
        self.value += value

    def set(self, value: float) -> None:
        self.sink.called(self, self.kind is Kind.GAUGE)
        self.value = value

    def observe(self, value: float) -> None:
        self.sink.called(self, self.kind is Kind.HISTOGRAM)
        self.value += value
        self.counts[bisect_left(self.bounds, value)] += 1


class FakeSink:
    """Families by name and series by labels, each once; ``text`` is what a scrape would show."""

    def __init__(self, *, has_histograms: bool = True) -> None:
        self.has_histograms = has_histograms
        self.families: dict[str, Kind] = {}
        self.series_made: dict[tuple[str, tuple[tuple[str, str], ...]], FakeSeries] = {}
        self.num_calls = 0
        self.last_called: FakeSeries | None = None
        self.broken: set[str] = set()

    def called(self, series: FakeSeries, allowed: bool) -> None:
        assert allowed, "the server ends itself over such a call"
        self.num_calls += 1
        self.last_called = series

    def series(
        self, name: str, kind: Kind, help: str, labels: Mapping[str, str], buckets: Sequence[float]
    ) -> Any:
        assert self.families.setdefault(name, kind) is kind, f"{name} is a family of another kind"
        key = (name, tuple(sorted(labels.items())))
        assert key not in self.series_made, f"{key} is made twice"
        self.series_made[key] = FakeSeries(self, kind, buckets)
        return _Broken() if name in self.broken else self.series_made[key]

    def text(self) -> str:
        lines = []
        for (name, labels), series in self.series_made.items():
            pairs = [f'{key}="{value}"' for key, value in labels]
            if series.kind is not Kind.HISTOGRAM:
                lines.append(f"{name}{{{','.join(pairs)}}} {series.value}")
                continue
            total = 0
            for bound, number in zip(series.bounds, series.counts, strict=True):
                total += number
                le = "+Inf" if math.isinf(bound) else f"{bound:g}"
                inside = ",".join([*pairs, f'le="{le}"'])
                lines.append(f"{name}_bucket{{{inside}}} {total}")
            lines.append(f"{name}_sum{{{','.join(pairs)}}} {series.value}")
            lines.append(f"{name}_count{{{','.join(pairs)}}} {total}")
        return "\n".join(lines)

    def scrape(self, time: float = 0.0) -> Scrape:
        return Scrape(self.text(), time, "llm")


class _Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no such metric any more")


@dataclass
class FakeAnswer:
    """An open request as the output thread shows it."""

    record: RequestRecord
    call: Any = None
    sequences: list[Any] = field(default_factory=list)

    @property
    def group(self) -> int:
        return self.record.group


def answer(group: int = 0, *, prompt: int = 10, n: int = 1, **changes: Any) -> Any:
    """A request that arrived at second 100."""
    record = RequestRecord(f"r{group}", group, "", prompt, n, 16, 100.0)
    for name, value in changes.items():
        setattr(record, name, value)
    sequences = [SimpleNamespace(sample_index=i) for i in range(n)]
    return FakeAnswer(record, SimpleNamespace(prompt=TextPrompt("the prompt")), sequences)


def take_token(observed: Any, to: Any, sample_index: int, now: float) -> None:
    """As the output thread does it: the record first, then the observer."""
    record = to.record
    record.num_output_tokens += 1
    record.first_token = now if record.first_token is None else record.first_token
    record.last_token = now
    observed.on_token(to, sample_index, now)


def step(**changes: Any) -> StepStats:
    """A decode step of 4 rows that took 20 ms, 1 ms of it for scheduling."""
    usual = {
        "started": 1.0,
        "scheduled": 1.001,
        "finished": 1.02,
        "num_decodes": 4,
        "num_prefills": 0,
        "num_prefill_tokens": 0,
        "num_recomputed_tokens": 0,
        "num_running": 4,
        "num_waiting": 0,
        "num_preempted": 0,
        "blocks_used": 8,
        "blocks_cached_free": 0,
    }
    return StepStats(**{**usual, **changes})
