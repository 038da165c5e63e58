"""The figures of bench, by hand."""

from __future__ import annotations

import pytest

from chairlift_client.timings import Arrival, Objective, Trace, spread, summarize


def trace(sent: float, *arrivals: tuple[float, int], error: str | None = None) -> Trace:
    return Trace(sent, 10, [Arrival(*each) for each in arrivals], error)


def test_a_trace_tells_first_token_gaps_and_pace() -> None:
    one = trace(1.0, (1.5, 1), (1.7, 1), (2.1, 2))
    assert one.ttft == pytest.approx(0.5)
    assert one.latency == pytest.approx(1.1)
    assert one.gaps == pytest.approx([0.2, 0.4])
    assert one.num_tokens == 4
    assert one.time_per_token == pytest.approx(0.6 / 3), "the first arrival's token is not counted"


def test_a_request_without_tokens_has_no_times() -> None:
    nothing = trace(1.0)
    assert (nothing.ttft, nothing.latency, nothing.time_per_token) == (None, None, None)
    assert nothing.gaps == []
    assert trace(0.0, (1.0, 5)).time_per_token is None, "one response alone has no pace"


def test_percentiles_lie_between_their_neighbours() -> None:
    values = spread([float(value) for value in range(1, 102)])
    assert values is not None
    assert (values.p50, values.p90, values.p99, values.largest) == (51.0, 91.0, 100.0, 101.0)
    assert values.mean == pytest.approx(51.0)
    assert spread([]) is None


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        (Objective(), True),
        (Objective(ttft=0.5), True),
        (Objective(ttft=0.49), False),
        (Objective(itl=0.2), True),
        (Objective(itl=0.19), False),
        (Objective(ttft=0.6, itl=0.1), False),
        (Objective.of_milliseconds(500.0, 200.0), True),
    ],
)
def test_an_objective_bounds_first_token_and_pace(objective: Objective, met: bool) -> None:
    assert objective.is_met_by(trace(0.0, (0.5, 1), (0.6, 1), (0.9, 1))) is met


def test_a_failed_request_never_meets_an_objective() -> None:
    assert not Objective().is_met_by(trace(0.0, (0.1, 1), error="cancelled"))
    assert not Objective().is_met_by(trace(0.0))


def test_a_summary_counts_from_the_first_request_to_the_last_token() -> None:
    traces = [
        trace(10.0, (11.0, 1), (12.0, 1)),
        trace(11.0, (11.5, 1), (14.0, 3)),
        trace(11.0, error="refused"),
    ]
    summary = summarize(traces, Objective(ttft=0.7))
    assert summary.duration == pytest.approx(4.0)
    assert summary.num_tokens == 6
    assert summary.tokens_per_second == pytest.approx(1.5)
    assert (summary.num_requests, summary.num_failed, summary.num_good) == (3, 1, 1)
    assert summary.requests_per_second == pytest.approx(0.5)
    assert summary.goodput == pytest.approx(0.25)
    assert summary.ttft is not None
    assert summary.ttft.p50 == pytest.approx(0.75)
    assert summary.num_prompt_tokens == 30


def test_a_summary_of_nothing_divides_by_nothing() -> None:
    empty = summarize([])
    assert (empty.tokens_per_second, empty.goodput, empty.ttft) == (0.0, 0.0, None)
    failed = summarize([trace(5.0, error="refused")])
    assert (failed.num_failed, failed.requests_per_second) == (1, 0.0)
