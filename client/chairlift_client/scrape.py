"""Reads /metrics: the samples of one scrape, and what happened between two of them."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from chairlift_client.errors import GenerateError
from chairlift_client.health import ask

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class Sample(NamedTuple):
    """One line of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> list[Sample]:
    """The samples of Prometheus's text format; comments are left out.

    Raises ValueError with the line that is none.
    """
    return list(_samples(text))


def _samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        found = _SAMPLE.match(line)
        if found is None:
            raise ValueError(f"not a sample of Prometheus's text format: {line!r}")
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2] or "")}
        yield Sample(found[1], labels, float(found[3]))


def _unescaped(value: str) -> str:
    return re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), value)


class Scrape:
    """The samples of one moment (``time`` in seconds, of any clock) for one model."""

    def __init__(self, text: str, time: float, model: str) -> None:
        self.time = time
        self._by_name: dict[str, list[Sample]] = {}
        for sample in parse(text):
            if sample.labels.get("model", model) == model:
                self._by_name.setdefault(sample.name, []).append(sample)

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series that have these labels; 0 where there is none."""
        return sum(
            sample.value
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The series of a name by one of their labels."""
        return {s.labels.get(label, ""): s.value for s in self._by_name.get(name, ())}

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by their upper bounds, smallest first."""
        found = {float(le): n for le, n in self.by_label(f"{name}_bucket", "le").items()}
        return dict(sorted(found.items()))


class Interval(NamedTuple):
    """What happened from one scrape to the next; counters that began anew count from zero."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        return max(self.after.time - self.before.time, 1e-9)

    def growth(self, name: str, **labels: str) -> float:
        now, then = self.after.value(name, **labels), self.before.value(name, **labels)
        return now - then if now >= then else now

    def rate(self, name: str, **labels: str) -> float:
        """Growth per second."""
        return self.growth(name, **labels) / self.seconds

    def quantile(self, name: str, share: float) -> float | None:
        """A histogram's quantile, straight lines within buckets; None where nothing was observed.

        What lies in the last bucket counts as its lower bound, as in PromQL.
        """
        earlier = self.before.buckets(name)
        counts = {le: n - earlier.get(le, 0.0) for le, n in self.after.buckets(name).items()}
        total = counts.get(math.inf, 0.0)
        if total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound, cumulative in counts.items():
            if cumulative >= share * total:
                if math.isinf(bound):
                    return lower
                inside = (share * total - below) / max(cumulative - below, 1e-9)
                return lower + (bound - lower) * inside
            lower, below = bound, cumulative
        return lower


def scrape(url: str, model: str, timeout: float = 10.0) -> Scrape:
    """Read /metrics now. Raises GenerateError where nobody answers with metrics."""
    try:
        reply = ask(url, "/metrics", timeout)
    except OSError as error:
        raise GenerateError(f"no metrics at {url}: {error}") from None
    if reply.status != 200:
        raise GenerateError(f"no metrics at {url}: HTTP {reply.status}")
    return Scrape(reply.body, time.monotonic(), model)
