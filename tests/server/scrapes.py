"""Scrapes of /metrics that hold everything up to a moment.

Metrics follow within half a second, one series after the other; the timestamp among them comes
last and says up to when they hold everything.
"""

from __future__ import annotations

import time

from chairlift_client.scrape import Interval, Scrape
from tests.server.harness import ServerProcess, wait_for
from tests.server.talk import wait_drained


def scrape(server: ServerProcess) -> Scrape:
    return Scrape(server.metrics(), time.monotonic(), "llm")


def complete(server: ServerProcess) -> Scrape:
    """A scrape that holds everything up to now."""
    now = time.time() * 1e6

    def flushed() -> bool:
        shown = scrape(server)
        return shown.value("nv_trt_llm_general_metrics", general_type="timestamp") > now

    wait_for("metrics of this moment", flushed, 10.0)
    # The server reads its series one by one too: the scrape that showed the timestamp may have
    # read another one before it was sent.
    return scrape(server)


def settled(server: ServerProcess, seconds: float = 10.0) -> Scrape:
    """Everything up to a moment at which nothing runs and nothing waits."""
    wait_drained(server, seconds)
    return complete(server)


def grown(
    server: ServerProcess, before: Scrape, name: str, amount: float, **labels: str
) -> Interval:
    """Everything up to a moment at which a counter has grown by so much."""

    def enough() -> bool:
        return Interval(before, scrape(server)).growth(name, **labels) >= amount

    wait_for(f"{name} to grow by {amount}", enough, 10.0)
    return Interval(before, complete(server))
