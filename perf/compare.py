#!/usr/bin/env python3
"""Chairlift against other engines on this machine: `python perf/compare.py --workloads A B C D`.

All engines are loaded first, in environments of their own that are made where they are missing,
and stay loaded. Then each round runs each workload on each engine in turn, so that a machine's
moods hit all of them; claims are ratios within a round. Writes JSON and Markdown after every round.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from measuring.comparison import Comparison, markdown
from measuring.engines import ENGINES, driver_command, driver_environment
from measuring.environments import Cache, SetupFailed
from measuring.machine import read_bandwidth, weight_bytes
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.peer_process import PeerFailed, PeerProcess
from measuring.processes import cpu_seconds
from measuring.results import about
from measuring.rounds import figures
from measuring.workload import WorkRequest, fresh, load_workload
from tokenizers import Tokenizer

QUESTION = "The capital of France is"
ANSWER = "Paris"
CHECK_TOKENS = 8
START_TIMEOUT = 900.0


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are stopped too
    comparison = Comparison(
        about=about(model=args.model.name, threads=args.threads, rounds=args.rounds),
        weight_bytes=weight_bytes(args.model),
    )
    out = args.out.with_suffix(".json")
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="chairlift-compare-") as logs:
        peers = start_all(args, comparison, Path(logs), stack)
        comparison.save(out)
        for round_number in range(args.rounds):
            run_round(args, comparison, peers, round_number)
            comparison.save(out)
    print(markdown(comparison))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["A", "B", "C", "D"])
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=list(ENGINES),
        help="default: all; llama.cpp only once it is built, which naming it here does",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run")
    parser.add_argument("--cache", type=Path, help="where environments are kept")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare")
    return parser.parse_args()


def start_all(
    args: argparse.Namespace, comparison: Comparison, logs: Path, stack: ExitStack
) -> dict[str, PeerProcess]:
    """Every engine that can be had, warmed up and checked; the others are noted as failures.

    Environments come first: building one beside a loaded engine would be in its way.
    """
    cache, launches = Cache(args.cache), {}
    for name in args.engines or default_engines(cache, comparison):
        spec = ENGINES[name]
        comparison.bits[name] = spec.bits
        if spec.is_ours:
            comparison.ours.append(name)
        try:
            launches[name] = spec.launch(cache, args.model)
        except SetupFailed as error:
            note_failure(comparison, name, error)
    peers = {}
    for name, launch in launches.items():
        print(f"{name}: starting", flush=True)
        command = driver_command(ENGINES[name], launch, args.model, args.threads)
        variables = driver_environment(launch, args.threads)
        try:
            peer = PeerProcess(
                command, launch.options, variables, logs / f"{name}.log", START_TIMEOUT
            )
            stack.callback(peer.close)
            comparison.versions[name] = peer.versions
            comparison.checks[name] = check(peer, args)
            peers[name] = peer
        except PeerFailed as error:
            note_failure(comparison, name, error)
    return peers


def default_engines(cache: Cache, comparison: Comparison) -> list[str]:
    """All of them, but llama.cpp, which is long to build, only where that has been done."""
    is_built = cache.llama_program.is_file()
    if not is_built:
        reason = "not built on this machine; `--engines llama.cpp-bf16` builds it"
        comparison.failures["llama.cpp"] = reason
    return [name for name in ENGINES if is_built or not name.startswith("llama.cpp")]


def note_failure(comparison: Comparison, name: str, error: Exception) -> None:
    print(f"{name}: FAILED: {error}", flush=True)
    comparison.failures[name] = str(error)


def check(peer: PeerProcess, args: argparse.Namespace) -> str:
    """The engine's greedy answer to a question everybody knows, after a warm-up.

    Raises PeerFailed where it does not know it: a fast engine that computes something else is none.
    """
    peer.run(load_workload("W"), args.timeout)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    prompt = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    run = peer.run([WorkRequest(prompt, CHECK_TOKENS)], args.timeout)
    text = run.texts[0] or str(tokenizer.decode(run.token_ids[0]))
    if ANSWER not in text:
        raise PeerFailed(f"asked to continue {QUESTION!r} it answered {text!r}")
    return text


def run_round(
    args: argparse.Namespace,
    comparison: Comparison,
    peers: dict[str, PeerProcess],
    round_number: int,
) -> None:
    """Each workload on each engine; another one goes first in each round."""
    names = list(peers)
    turn = round_number % max(1, len(names))
    for workload in args.workloads:
        requests = fresh(load_workload(workload), round_number * 100 + ord(workload))
        comparison.bandwidth.append(read_bandwidth(comparison.weight_bytes, args.threads))
        for name in names[turn:] + names[:turn]:
            if name not in comparison.failures:
                run_one(args, comparison, peers, name, workload, requests, round_number)


def run_one(
    args: argparse.Namespace,
    comparison: Comparison,
    peers: dict[str, PeerProcess],
    name: str,
    workload: str,
    requests: list[WorkRequest],
    round_number: int,
) -> None:
    others = [peer.pid for other, peer in peers.items() if other != name]
    before, start = sum(map(cpu_seconds, others)), time.perf_counter()
    try:
        result = figures(peers[name].run(requests, args.timeout))
    except PeerFailed as error:
        note_failure(comparison, name, error)
        return
    taken = (sum(map(cpu_seconds, others)) - before) / (time.perf_counter() - start)
    comparison.idle_cpu = max(comparison.idle_cpu, taken)
    comparison.note(workload, name, round_number, result)
    print(
        f"round {round_number + 1} {workload} {name}: {result.tokens_per_second:.0f} tok/s, "
        f"{result.seconds:.2f} s, {result.ms_per_token:.2f} ms per token",
        flush=True,
    )


if __name__ == "__main__":
    main()
