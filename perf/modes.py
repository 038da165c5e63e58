#!/usr/bin/env python3
"""Static, dynamic and continuous batching on the same workload: `python perf/modes.py`.

Three servers of the same engine, batch size 8, on workload E, whose answers have a long tail. First
everything at once: throughput, and how full the batch was. Then Poisson arrivals at 70 % of what
static batching sustained: latency. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from measuring.rounds import Ratio
from measuring.seats import Seats, occupied, settled_scrape, steps_between
from measuring.workload import fresh, load_workload

from chairlift_client.load import LoadClient, LoadRequest, closed_loop, open_loop, poisson_offsets
from chairlift_client.timings import Trace, summarize
from chairlift_client.trial import TrialServer, trial_server

MODES = ("static", "dynamic", "continuous")
LOAD_SHARE = 0.7
INPUTS = {"temperature": 0.0, "return_perf_metrics": True}


class ModeRun(NamedTuple):
    """One mode, one round; seconds, milliseconds, and shares of the batch's seats and steps."""

    tokens_per_second: float
    requests_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    latency_p50_ms: float
    latency_p99_ms: float
    seats_occupied: float
    tokens_per_step: float
    rows_per_step: float
    num_steps: int


def main() -> None:
    args = parse_arguments()
    closed: dict[str, list[ModeRun]] = {mode: [] for mode in MODES}
    poisson: dict[str, list[ModeRun]] = {mode: [] for mode in MODES}
    settings = {
        "batch_size": args.batch_size,
        "max_num_seqs": args.batch_size,
        "threads": args.threads,
        "model": str(args.model),
    }
    with ExitStack() as stack:
        servers = {
            mode: stack.enter_context(trial_server(settings, batching=mode)) for mode in MODES
        }
        for server in servers.values():
            run(server, requests_of("W", 0, args), None, args)
        for number in range(args.rounds):
            for mode, server in servers.items():
                closed[mode].append(run(server, requests_of("E", number, args), None, args))
                print(f"round {number + 1} {mode}: {closed[mode][-1]}", flush=True)
        capacity = median(each.requests_per_second for each in closed["static"])
        rate = LOAD_SHARE * capacity
        for number in range(args.rounds):
            requests = requests_of("E", args.rounds + number, args)
            offsets = poisson_offsets(rate, len(requests), random.Random(number))
            for mode, server in servers.items():
                poisson[mode].append(run(server, requests, offsets, args))
                print(f"round {number + 1} {mode}: {poisson[mode][-1]}", flush=True)
    write(args, closed, poisson, rate)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--requests", type=int, help="only the first so many of the workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "modes")
    return parser.parse_args()


def requests_of(workload: str, salt: int, args: argparse.Namespace) -> list[LoadRequest]:
    """The workload as the server takes it: token ids, greedy, past any end token."""
    return [
        LoadRequest(
            {"input_ids": each.prompt_ids, "max_tokens": each.max_tokens}, {"ignore_eos": True}
        )
        for each in fresh(load_workload(workload)[: args.requests], salt)
    ]


def run(
    server: TrialServer,
    requests: Sequence[LoadRequest],
    offsets: Sequence[float] | None,
    args: argparse.Namespace,
) -> ModeRun:
    """All at once, or at the given offsets in seconds."""
    seats = Seats()
    before = settled_scrape(server.metrics_url)
    with LoadClient(
        server.grpc, "llm", time.perf_counter, extra_inputs=INPUTS, on_response=seats.read
    ) as client:
        if offsets is None:
            traces = closed_loop(client, requests, len(requests))
        else:
            traces = open_loop(client, requests, offsets, time.perf_counter, time.sleep)
    errors = [trace.error for trace in traces if trace.error is not None]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    steps = steps_between(before, settled_scrape(server.metrics_url))
    return figures(traces, occupied(seats.stays.values(), args.batch_size), steps)


def figures(traces: Sequence[Trace], seats_occupied: float, steps: Any) -> ModeRun:
    summary = summarize(traces)
    assert summary.ttft is not None and summary.latency is not None
    return ModeRun(
        tokens_per_second=summary.tokens_per_second,
        requests_per_second=summary.requests_per_second,
        ttft_p50_ms=summary.ttft.p50 * 1e3,
        ttft_p99_ms=summary.ttft.p99 * 1e3,
        latency_p50_ms=summary.latency.p50 * 1e3,
        latency_p99_ms=summary.latency.p99 * 1e3,
        seats_occupied=seats_occupied,
        tokens_per_step=steps.tokens_per_step,
        rows_per_step=steps.rows_per_step,
        num_steps=steps.number,
    )


def middle(runs: Sequence[ModeRun]) -> ModeRun:
    return ModeRun(*(median(column) for column in zip(*runs, strict=True)))  # type: ignore[arg-type]


def quotient(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Round by round."""
    quotients = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(median(quotients), min(quotients), max(quotients))


def write(
    args: argparse.Namespace,
    closed: dict[str, list[ModeRun]],
    poisson: dict[str, list[ModeRun]],
    rate: float,
) -> None:
    fields = (
        "output tok/s",
        "requests/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "answer p50 ms",
        "answer p99 ms",
        "seats occupied",
        "tokens per step",
        "rows per step",
        "steps",
    )
    text = ["## Everything at once", ""]
    text += table(["mode", *fields], [[mode, *middle(runs)] for mode, runs in closed.items()])
    text += ["", f"## Poisson arrivals, {rate:.2f} requests/s (70 % of static's capacity)", ""]
    text += table(["mode", *fields], [[mode, *middle(runs)] for mode, runs in poisson.items()])
    rows = []
    for mode in ("dynamic", "continuous"):
        rates = [[each.tokens_per_second for each in closed[name]] for name in (mode, "static")]
        waits = [[each.ttft_p50_ms for each in poisson[name]] for name in (mode, "static")]
        rows.append([f"{mode} / static, output tok/s", quotient(*rates)])
        rows.append([f"{mode} / static, median TTFT", quotient(*waits)])
    text += ["", "## Ratios within a round: median (range)", "", *table(["what", "ratio"], rows)]
    data = {
        name: {mode: [each._asdict() for each in runs] for mode, runs in part.items()}
        for name, part in (("closed", closed), ("poisson", poisson))
    }
    facts = about(rounds=args.rounds, batch_size=args.batch_size, threads=args.threads)
    title = "Static, dynamic and continuous batching"
    save(args.out, title, facts, {**data, "rate": rate}, text)


if __name__ == "__main__":
    main()
