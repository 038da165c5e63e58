#!/usr/bin/env python3
"""What sending costs: step time with 64 streams being sent, with none, and without a server.

`python perf/streams.py`. A server answers the same 64 requests once streamed token by token and
once with one response at the end; the engine's own clock measures its steps, so the difference is
what sending takes from it: the interpreter lock, and the cores that tritonserver and the client
share with it. The engine alone is the third. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

from measuring.own_engine import OwnEngine
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from measuring.rounds import Ratio
from measuring.seats import settled_scrape, steps_between
from measuring.workload import WorkRequest, fresh, load_workload

from chairlift_client.load import LoadClient, LoadRequest, closed_loop
from chairlift_client.trial import TrialServer, trial_server

PROMPT_TOKENS = 16
AIM = 1.05


class StepTime(NamedTuple):
    """Mean milliseconds of a step, how many there were, and the client's processor seconds."""

    ms: float
    number: int
    client_cpu: float


def main() -> None:
    args = parse_arguments()
    settings = {"threads": args.threads, "max_num_seqs": args.streams, "model": str(args.model)}
    found: dict[str, list[StepTime]] = {"streamed": [], "not streamed": [], "engine alone": []}
    with ExitStack() as stack:
        server = stack.enter_context(trial_server(settings))
        alone = OwnSteps(settings)
        stack.callback(alone.close)
        for number in range(args.rounds + 1):
            requests = requests_of(args, number)
            round_found = {
                "streamed": through_server(server, requests, stream=True),
                "not streamed": through_server(server, requests, stream=False),
                "engine alone": alone.run(requests),
            }
            print(f"round {number}: {round_found}", flush=True)
            if number:  # the first one warms up
                for name, step_time in round_found.items():
                    found[name].append(step_time)
    write(args, found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "streams")
    return parser.parse_args()


def requests_of(args: argparse.Namespace, salt: int) -> list[WorkRequest]:
    """Short prompts and answers of one length: nearly all steps are full decode steps."""
    prompts = [each.prompt_ids[:PROMPT_TOKENS] for each in fresh(load_workload("A"), salt)]
    return [
        WorkRequest(prompts[number % len(prompts)], args.tokens) for number in range(args.streams)
    ]


def through_server(server: TrialServer, requests: list[WorkRequest], *, stream: bool) -> StepTime:
    before = settled_scrape(server.metrics_url)
    inputs = {"temperature": 0.0, "stream": stream}
    load = [
        LoadRequest({"input_ids": r.prompt_ids, "max_tokens": r.max_tokens}, {"ignore_eos": True})
        for r in requests
    ]
    with LoadClient(server.grpc, "llm", time.perf_counter, extra_inputs=inputs) as client:
        cpu = time.process_time()
        traces = closed_loop(client, load, len(load))
        cpu = time.process_time() - cpu
    errors = [trace.error for trace in traces if trace.error is not None]
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    steps = steps_between(before, settled_scrape(server.metrics_url))
    return StepTime(steps.seconds_per_step * 1e3, steps.number, cpu)


class OwnSteps:
    """The engine alone, its steps timed by itself."""

    def __init__(self, settings: dict[str, object]) -> None:
        self._seconds: list[float] = []
        self._engine = OwnEngine(settings, on_step=self._note)

    def _note(self, stats: object) -> None:
        self._seconds.append(stats.finished - stats.started)  # type: ignore[attr-defined]

    def run(self, requests: list[WorkRequest]) -> StepTime:
        self._seconds.clear()
        self._engine.run(requests)
        number = len(self._seconds)
        return StepTime(sum(self._seconds) / number * 1e3, number, 0.0)

    def close(self) -> None:
        self._engine.close()


def write(args: argparse.Namespace, found: dict[str, list[StepTime]]) -> None:
    rows = []
    for name, times in found.items():
        ms = [each.ms for each in times]
        rows.append(
            [
                name,
                f"{median(ms):.2f} ({min(ms):.2f}-{max(ms):.2f})",
                median(each.number for each in times),
                f"{median(each.client_cpu for each in times):.2f}",
            ]
        )
    text = table(["", "ms per step, median (range)", "steps", "client CPU s"], rows)
    for under in ("not streamed", "engine alone"):
        pairs = zip(found["streamed"], found[under], strict=True)
        quotients = [streamed.ms / other.ms for streamed, other in pairs]
        ratio = Ratio(median(quotients), min(quotients), max(quotients))
        aim = f", aim at most {AIM}" if under == "not streamed" else ""
        text += ["", f"streamed / {under}: {ratio}{aim}"]
    facts = about(streams=args.streams, tokens=args.tokens, threads=args.threads)
    data = {name: [each._asdict() for each in times] for name, times in found.items()}
    save(args.out, "Step time with and without streams being sent", facts, data, text)


if __name__ == "__main__":
    main()
