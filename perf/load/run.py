#!/usr/bin/env python3
"""Triton's own perf_analyzer against Chairlift, one command per scenario:

    python perf/load/run.py sweep        python perf/load/run.py long
    python perf/load/run.py rate         python perf/load/run.py streaming
    python perf/load/run.py bursts       python perf/load/run.py whole
    python perf/load/run.py prefix

Starts a server of its own in the mode that --batching names, or measures the one at --url. The
figures are read from perf_analyzer's profile export: TTFT, ITL, throughput, and goodput under the
limits that --slo-ttft and --slo-itl set.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measuring.environments import Cache
from measuring.load_scenarios import Level, Scenario, command, input_json, load_scenarios
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.profile_export import read_export
from measuring.results import about, save, table
from measuring.workload import load_workload

from chairlift_client.bench import Pace, Target, measure
from chairlift_client.bench_requests import warm_up_requests
from chairlift_client.stream import Endpoint, parse_url
from chairlift_client.timings import Objective, Spread, Summary, summarize
from chairlift_client.trial import trial_server

HEADINGS = (
    "load",
    "requests",
    "output tok/s",
    "requests/s",
    "goodput/s",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "ITL p50 ms",
    "ITL p99 ms",
)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="chairlift-load-") as folder, ExitStack() as stack:
        scenarios = load_scenarios(Path(folder))
        args = parse_arguments(scenarios)
        scenario = scenarios[args.scenario]
        endpoint = find_server(args, stack)
        measure(Target(endpoint, args.model_name), warm_up_requests(8), Pace(), Objective())
        inputs = Path(folder) / "inputs.json"
        inputs.write_text(input_json(load_workload(scenario.workload), stream=scenario.stream))
        objective = Objective.of_milliseconds(args.slo_ttft, args.slo_itl)
        found = {}
        for level in scenario.levels:
            found[level.name] = run_level(args, endpoint, inputs, level, objective)
            print(f"{scenario.name}, {level.name}: {found[level.name]}", flush=True)
        write(args, scenario, found)


def parse_arguments(scenarios: dict[str, Scenario]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", choices=list(scenarios))
    parser.add_argument(
        "--batching", default="continuous", choices=["continuous", "dynamic", "static"]
    )
    parser.add_argument("--url", help="a running server, grpc://host:port")
    parser.add_argument("--model-name", default="llm")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--slo-ttft", type=float, default=1000.0, help="milliseconds")
    parser.add_argument("--slo-itl", type=float, default=100.0, help="milliseconds per token")
    parser.add_argument("--perf-analyzer", type=Path, help="the program, instead of pip's")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one level")
    parser.add_argument("--out", type=Path, help="where the results go, without an ending")
    return parser.parse_args()


def find_server(args: argparse.Namespace, stack: ExitStack) -> Endpoint:
    if args.url is not None:
        return parse_url(args.url)
    settings = {"model": str(args.model)}
    return stack.enter_context(trial_server(settings, batching=args.batching)).grpc


def run_level(
    args: argparse.Namespace, endpoint: Endpoint, inputs: Path, level: Level, objective: Objective
) -> Summary:
    """One run of perf_analyzer; its export is read and thrown away."""
    tool = Cache(say=lambda text: print(text, file=sys.stderr)).perf_analyzer()
    program = args.perf_analyzer or tool.program
    export = inputs.with_name("export.json")
    export.unlink(missing_ok=True)
    address = f"{endpoint.host}:{endpoint.port}"
    line = command(program, address, args.model_name, inputs, level, export)
    done = subprocess.run(
        line,
        env=tool.variables,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=args.timeout,
    )
    if done.returncode or not export.is_file():
        raise SystemExit(f"perf_analyzer failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return summarize(read_export(export), objective)


def row(name: str, summary: Summary) -> list[object]:
    def ms(spread: Spread | None) -> tuple[object, object]:
        return ("-", "-") if spread is None else (spread.p50 * 1e3, spread.p99 * 1e3)

    return [
        name,
        summary.num_requests - summary.num_failed,
        summary.tokens_per_second,
        summary.requests_per_second,
        summary.goodput,
        *ms(summary.ttft),
        *ms(summary.itl),
    ]


def write(args: argparse.Namespace, scenario: Scenario, found: dict[str, Summary]) -> None:
    mode = "a running server" if args.url else args.batching
    facts = about(
        batching=mode,
        workload=scenario.workload,
        slo_ttft_ms=args.slo_ttft,
        slo_itl_ms=args.slo_itl,
    )
    text = [scenario.about, "", *table(HEADINGS, [row(*each) for each in found.items()])]
    data = {
        name: {
            key: value._asdict() if isinstance(value, Spread) else value
            for key, value in summary._asdict().items()
        }
        for name, summary in found.items()
    }
    default = RESULTS / f"load-{scenario.name}-{'url' if args.url else args.batching}"
    save(args.out or default, f"perf_analyzer: {scenario.name}, {mode}", facts, data, text)


if __name__ == "__main__":
    main()
