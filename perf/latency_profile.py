#!/usr/bin/env python3
"""Settings that keep streams steady while long prompts arrive, and what they cost in throughput.

`python perf/latency_profile.py`. 16 streams generate; every 20 tokens a prompt of 1,500 tokens
arrives, 8 in all. The streams' inter-token latency says how much the prompts disturb them. The same
settings then run workload A, everything at once: that is the price. Engine alone, interleaved.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring.own_engine import OwnEngine
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from measuring.workload import WorkRequest, fresh, load_workload

from chairlift_client.timings import summarize

NUM_STREAMS = 16
STREAM_PROMPT = 32
STREAM_TOKENS = 240
TOKENS_BETWEEN_PROMPTS = 20
POOL_BYTES = 1 << 30
BUSY_SALT = 1000
AIM = 3.0

# Tokens per step, and the most of one long prompt per step (0: no limit of its own).
PROFILES: Mapping[str, Mapping[str, int]] = {
    "default": {},
    "step 256": {"max_num_batched_tokens": 256},
    "step 128": {"max_num_batched_tokens": 128},
    "long prompt 128": {"long_prefill_token_threshold": 128},
    "long prompt 64": {"long_prefill_token_threshold": 64},
    "long prompt 32": {"long_prefill_token_threshold": 32},
    "step 96, long prompt 32": {
        "max_num_batched_tokens": 96,
        "long_prefill_token_threshold": 32,
    },
    "step 64, long prompt 16": {
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 16,
    },
}


class ProfileRun(NamedTuple):
    """Milliseconds between the streams' tokens, until long prompts' first token, and tokens per
    second on workload A."""

    itl_p50_ms: float
    itl_p99_ms: float
    itl_ratio: float
    long_ttft_p50_ms: float
    throughput: float


class Disturbed:
    """An engine under the streams, which sends itself the long prompts as tokens come."""

    def __init__(self, settings: Mapping[str, Any], loaded: Any) -> None:
        self._emits = 0
        self._long: list[WorkRequest] = []
        self._long_uids: list[int] = []
        self.engine = OwnEngine(settings, loaded=loaded, after_emit=self._after_emit)

    def run(self, salt: int) -> ProfileRun:
        prompts = [each.prompt_ids[:STREAM_PROMPT] for each in fresh(load_workload("A"), salt)]
        streams = [WorkRequest(prompt, STREAM_TOKENS) for prompt in prompts[:NUM_STREAMS]]
        self._emits, self._long_uids = 0, []
        self._long = fresh(load_workload("D"), salt)
        uids = self.engine.submit(streams)
        self.engine.wait()
        steady = summarize(self.engine.take(uids)).itl
        long = summarize(self.engine.take(self._long_uids)).ttft
        busy = summarize(self.engine.run(fresh(load_workload("A"), salt + BUSY_SALT)))
        assert steady is not None and long is not None
        return ProfileRun(
            steady.p50 * 1e3,
            steady.p99 * 1e3,
            steady.p99 / steady.p50,
            long.p50 * 1e3,
            busy.tokens_per_second,
        )

    def _after_emit(self) -> None:
        """In the engine's thread, once per step."""
        self._emits += 1
        if self._long and self._emits % TOKENS_BETWEEN_PROMPTS == 0:
            self._long_uids += self.engine.submit([self._long.pop(0)])


def main() -> None:
    args = parse_arguments()
    common = {
        "model": str(args.model),
        "threads": args.threads,
        "kv_cache_memory_bytes": POOL_BYTES,
    }
    found: dict[str, list[ProfileRun]] = {name: [] for name in args.profiles}
    with ExitStack() as stack:
        engines: dict[str, Disturbed] = {}
        loaded = None
        for name in args.profiles:
            engines[name] = Disturbed({**common, **PROFILES[name]}, loaded)
            stack.callback(engines[name].engine.close)
            loaded = engines[name].engine.assembly.loaded
        engines[args.profiles[0]].run(args.rounds)  # warms up
        for number in range(args.rounds):
            for name, engine in engines.items():
                found[name].append(engine.run(number))
                print(f"round {number + 1} {name}: {found[name][-1]}", flush=True)
    write(args, found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(PROFILES)
    parser.add_argument("--profiles", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "latency_profile")
    return parser.parse_args()


def middle(runs: Sequence[ProfileRun]) -> ProfileRun:
    return ProfileRun(*(median(column) for column in zip(*runs, strict=True)))


def steadiest_cheap(figures: Mapping[str, ProfileRun]) -> str | None:
    """Of the profiles that meet the aim, the one with the highest throughput."""
    steady = {name: each for name, each in figures.items() if each.itl_ratio < AIM}
    return max(steady, key=lambda name: steady[name].throughput, default=None)


def write(args: argparse.Namespace, found: Mapping[str, Sequence[ProfileRun]]) -> None:
    figures = {name: middle(runs) for name, runs in found.items()}
    base = figures[args.profiles[0]].throughput
    headings = ["settings", "ITL p50 ms", "ITL p99 ms", "p99 / p50", "long prompts' TTFT p50 ms"]
    rows = [[name, *each, f"{each.throughput / base - 1:+.1%}"] for name, each in figures.items()]
    text = table([*headings, "workload A tok/s", "cost"], rows)
    chosen = steadiest_cheap(figures)
    if chosen is None:
        text += ["", f"No profile keeps p99 below {AIM} x the median."]
    else:
        text += ["", f"Chosen: **{chosen}** {dict(PROFILES[chosen])}"]
    facts = about(rounds=args.rounds, threads=args.threads)
    data = {name: [each._asdict() for each in runs] for name, runs in found.items()}
    settings = dict(PROFILES[chosen]) if chosen else None
    save(
        args.out,
        "Steady streams while long prompts arrive",
        facts,
        {"chosen": settings, "runs": data},
        text,
    )


if __name__ == "__main__":
    main()
