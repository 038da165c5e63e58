#!/usr/bin/env python3
"""Requests that come at the same moment: how long until the first token of each?

`python perf/simultaneous.py`. Small groups of requests are sent at once to an idle server, with the
engine's queue and with Triton's (`--triton-queue`), whose batcher may sleep for half a second over
what came while it handed over the first of them. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table

from chairlift_client.load import LoadClient, LoadRequest
from chairlift_client.trial import TrialServer, trial_server

GROUPS = (1, 2, 4, 8)
ASLEEP = 0.3  # seconds: far above what eight short prompts take, below the batcher's half second


def main() -> None:
    args = parse_arguments()
    settings = {"model": str(args.model)}
    found: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        servers = {
            "the engine's": stack.enter_context(trial_server(settings)),
            "Triton's": stack.enter_context(trial_server(settings, triton_queue=True)),
        }
        for size in GROUPS:
            found |= compare(servers, size, args.rounds)
            print(size, {queue: waited(found[queue, size]) for queue in servers}, flush=True)
    write(args, found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "simultaneous")
    return parser.parse_args()


def compare(
    servers: dict[str, TrialServer], size: int, rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Groups of ``size`` requests to each server in turn: seconds to their first tokens."""
    found: dict[tuple[str, int], list[float]] = {(queue, size): [] for queue in servers}
    with ExitStack() as stack:
        clients = {
            queue: stack.enter_context(
                LoadClient(server.grpc, "llm", time.perf_counter, num_streams=size)
            )
            for queue, server in servers.items()
        }
        for number in range(rounds + 1):
            for queue, client in clients.items():
                seconds = first_tokens(client, size)
                if number:  # the first one warms up
                    found[queue, size] += seconds
    return found


def first_tokens(client: LoadClient, size: int) -> list[float]:
    inputs = {"text_input": "Count: 1 2 3", "max_tokens": 4, "temperature": 0.0, "stream": True}
    traces = [client.submit(LoadRequest(inputs, {"ignore_eos": True})) for _ in range(size)]
    client.wait(lambda: client.num_open == 0)
    for trace in traces:
        if trace.error is not None or trace.ttft is None:
            raise SystemExit(f"a request failed: {trace.error}")
    return [trace.ttft for trace in traces if trace.ttft is not None]


def waited(seconds: list[float]) -> str:
    return f"{sum(each > ASLEEP for each in seconds)} of {len(seconds)}"


def write(args: argparse.Namespace, found: dict[tuple[str, int], list[float]]) -> None:
    rows = [
        [size, queue, f"{median(seconds) * 1e3:.0f}", f"{max(seconds) * 1e3:.0f}", waited(seconds)]
        for (queue, size), seconds in found.items()
    ]
    head = ["at once", "queue", "TTFT median ms", "largest ms", f"above {ASLEEP * 1e3:.0f} ms"]
    data = {f"{queue}, {size} at once": seconds for (queue, size), seconds in found.items()}
    facts = about(rounds=args.rounds, model=args.model.name)
    save(args.out, "First tokens of requests sent at once", facts, data, table(head, rows))


if __name__ == "__main__":
    main()
