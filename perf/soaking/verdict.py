"""Does memory grow? A straight line through the second part of a run, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from .footprint import Footprint
from .traffic import Note

# Caches fill and arenas settle first.
WARM_UP_SHARE = 1 / 3
# A line through so many means of stretches; within a stretch samples depend on each other.
STRETCHES = 12
# A short run cannot tell a slope from the last settling, so it may grow by so much in all: a share
# for large processes, and for small ones what thread arenas take (1.0 MiB of tritonserver's 46 in a
# run of two minutes).
GROWTH_ALLOWED = 0.02
ARENAS = 3 << 20


class Slope(NamedTuple):
    """Bytes per hour with its standard error; ``growth`` is that of the line over the run."""

    name: str
    level: float
    per_hour: float
    error: float
    growth: float

    @property
    def is_flat(self) -> bool:
        """Zero within noise, or too small to matter."""
        within_noise = abs(self.per_hour) <= 2 * self.error
        return within_noise or self.growth <= max(GROWTH_ALLOWED * self.level, ARENAS)


class Latency(NamedTuple):
    """Medians in seconds of the requests that ran to their end, by part of the run."""

    kind: str
    number: int
    first_early: float
    first_late: float
    total_early: float
    total_late: float


def slopes(samples: Sequence[Footprint]) -> list[Slope]:
    """For each kind of memory; needs ``STRETCHES`` samples after the warm-up."""
    settled = [s for s in samples if s.at >= samples[-1].at * WARM_UP_SHARE]
    return [
        slope(name, [s.at for s in settled], [getattr(s, name) for s in settled])
        for name in ("server", "stubs", "supervisor", "shared")
    ]


def slope(name: str, times: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares through the means of stretches."""
    stretches = min(STRETCHES, len(times))
    x = np.array([part.mean() for part in np.array_split(np.array(times), stretches)]) / 3600
    y = np.array([part.mean() for part in np.array_split(np.array(values, dtype=float), stretches)])
    centred = x - x.mean()
    per_hour = float(centred @ (y - y.mean()) / (centred @ centred))
    residuals = y - y.mean() - per_hour * centred
    error = float(np.sqrt(residuals @ residuals / max(1, stretches - 2) / (centred @ centred)))
    hours = (times[-1] - times[0]) / 3600
    return Slope(name, fmean(values), per_hour, error, per_hour * hours)


def latencies(notes: Sequence[Note], seconds: float) -> list[Latency]:
    """First half after the warm-up against the second."""
    rows = []
    warm, middle = seconds * WARM_UP_SHARE, seconds * (1 + WARM_UP_SHARE) / 2
    for kind in sorted({note.kind for note in notes}):
        done = [n for n in notes if n.kind == kind and n.end == "done" and n.first is not None]
        early = [n for n in done if warm <= n.at < middle]
        late = [n for n in done if n.at >= middle]
        if early and late:
            rows.append(
                Latency(
                    kind,
                    len(done),
                    *(median(n.first or 0.0 for n in part) for part in (early, late)),
                    *(median(n.total for n in part) for part in (early, late)),
                )
            )
    return rows
