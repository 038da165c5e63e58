"""How full a batch was: seats by the server's own timestamps, rows and tokens by its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chairlift_client.scrape import Interval, Scrape, scrape

SETTLE_SECONDS = 0.6
SETTLE_TRIES = 20
STEPS = "chairlift:steps_total"


@dataclass(slots=True)
class Stay:
    """When a request took its seat and when its last token came; nanoseconds since the epoch."""

    boarded: int = 0
    left: int = 0


@dataclass(slots=True)
class Seats:
    """Collects stays from `return_perf_metrics`; give `read` to the load client."""

    stays: dict[str, Stay] = field(default_factory=dict)

    def read(self, request_id: str, response: Any) -> None:
        """Note the times that a response carries; the last one that carries them is right."""
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "first_scheduled_time_ns":
                self._stay(request_id).boarded = int.from_bytes(content[:8], "little")
            elif output.name == "last_token_time_ns":
                self._stay(request_id).left = int.from_bytes(content[:8], "little")

    def _stay(self, request_id: str) -> Stay:
        return self.stays.setdefault(request_id, Stay())


def occupied(stays: Iterable[Stay], num_seats: int) -> float:
    """The share of seats, over the whole run, that a request sat in which was not done yet."""
    known = [stay for stay in stays if stay.boarded and stay.left]
    if not known:
        return 0.0
    whole = max(stay.left for stay in known) - min(stay.boarded for stay in known)
    return sum(stay.left - stay.boarded for stay in known) / (whole * num_seats)


class Steps(NamedTuple):
    """What the engine's steps did between two scrapes; seconds per step."""

    number: int
    tokens_per_step: float
    rows_per_step: float
    seconds_per_step: float


def steps_between(before: Scrape, after: Scrape) -> Steps:
    """The engine's step counters over an interval; zeros where the server reports none."""
    interval = Interval(before, after)
    number = interval.growth(STEPS)
    if not number:
        return Steps(0, 0.0, 0.0, 0.0)
    return Steps(
        int(number),
        interval.growth("chairlift:step_tokens_total") / number,
        interval.growth("chairlift:step_rows_sum") / number,
        interval.growth("chairlift:step_seconds_sum") / number,
    )


def settled_scrape(url: str, model: str = "llm") -> Scrape:
    """A scrape after the counters have come to rest: they reach the server in batches."""
    last = scrape(url, model)
    for _ in range(SETTLE_TRIES):
        time.sleep(SETTLE_SECONDS)
        now = scrape(url, model)
        if now.value(STEPS) == last.value(STEPS):
            return now
        last = now
    return last
