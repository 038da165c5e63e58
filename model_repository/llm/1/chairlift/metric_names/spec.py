"""How one metric is described; the tables beside this file are made of these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """One family on /metrics.

    ``label`` is the one label it has beside ``model`` and ``version``; those of its ``values`` are
    there from the start, so that a rate can be taken from the first event on. A ``dense`` histogram
    has an observation per token or per step: see ``metrics.BucketCounters``.
    """

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    dense: bool = False

    def exposed(self) -> tuple[str, ...]:
        """The names that a scrape shows."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def counter(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Spec:
    return Spec(name, Kind.COUNTER, help, label, values)


def gauge(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Spec:
    return Spec(name, Kind.GAUGE, help, label, values)


def histogram(name: str, help: str, buckets: tuple[float, ...], *, dense: bool = False) -> Spec:
    return Spec(name, Kind.HISTOGRAM, help, buckets=buckets, dense=dense)
