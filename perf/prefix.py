#!/usr/bin/env python3
"""The classic shared prefix: 32 requests at once share 200 tokens. `python perf/prefix.py`.

Time to first token and the KV blocks in use with prefix sharing and without, on the engine alone,
interleaved. Each round's prompts are new, so all that is shared is shared within the round.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring.own_engine import OwnEngine
from measuring.paths import DEFAULT_MODEL, RESULTS
from measuring.results import about, save, table
from measuring.rounds import Ratio
from measuring.workload import fresh, load_workload

from chairlift_client.timings import summarize

POOL_BYTES = 1 << 30
NAMES = {True: "prefix sharing", False: "without"}


class PrefixRun(NamedTuple):
    """Milliseconds, tokens per second, prompt tokens taken from the cache, and the most KV blocks
    in use at any step."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    tokens_per_second: float
    cached_tokens: int
    most_blocks: int


class PrefixEngine:
    """An engine whose largest number of used blocks is watched."""

    def __init__(self, settings: dict[str, Any], loaded: Any = None) -> None:
        self._most_blocks = 0
        self.engine = OwnEngine(settings, loaded=loaded, on_step=self._watch)

    def _watch(self, stats: Any) -> None:
        self._most_blocks = max(self._most_blocks, stats.blocks_used)

    def run(self, salt: int) -> PrefixRun:
        self._most_blocks = 0
        uids = self.engine.submit(fresh(load_workload("B"), salt))
        self.engine.wait()
        summary = summarize(self.engine.take(uids))
        assert summary.ttft is not None
        return PrefixRun(
            summary.ttft.p50 * 1e3,
            summary.ttft.p99 * 1e3,
            summary.tokens_per_second,
            sum(self.engine.num_cached[uid] for uid in uids),
            self._most_blocks,
        )


def main() -> None:
    args = parse_arguments()
    settings = {
        "model": str(args.model),
        "threads": args.threads,
        "kv_cache_memory_bytes": POOL_BYTES,
    }
    found: dict[bool, list[PrefixRun]] = {True: [], False: []}
    with ExitStack() as stack:
        shared = PrefixEngine({**settings, "enable_prefix_caching": True})
        stack.callback(shared.engine.close)
        alone = PrefixEngine(
            {**settings, "enable_prefix_caching": False}, shared.engine.assembly.loaded
        )
        stack.callback(alone.engine.close)
        for number in range(args.rounds + 1):
            pair = {True: shared.run(number), False: alone.run(number)}
            print(f"round {number}: {pair}", flush=True)
            if number:  # the first one warms up
                for sharing, result in pair.items():
                    found[sharing].append(result)
    write(args, found)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--out", type=Path, default=RESULTS / "prefix")
    return parser.parse_args()


def write(args: argparse.Namespace, found: dict[bool, list[PrefixRun]]) -> None:
    headings = ["", "TTFT p50 ms", "TTFT p99 ms", "tok/s", "cached prompt tokens", "most KV blocks"]
    rows = [
        [NAMES[sharing], *(median(column) for column in zip(*runs, strict=True))]
        for sharing, runs in found.items()
    ]
    quotients = [
        with_it.ttft_p50_ms / without.ttft_p50_ms
        for with_it, without in zip(found[True], found[False], strict=True)
    ]
    ratio = Ratio(median(quotients), min(quotients), max(quotients))
    text = [*table(headings, rows), "", f"TTFT p50, sharing / without: {ratio}"]
    data = {NAMES[key]: [each._asdict() for each in runs] for key, runs in found.items()}
    facts = about(rounds=args.rounds, threads=args.threads, workload="B")
    save(args.out, "32 requests that share 200 tokens", facts, data, text)


if __name__ == "__main__":
    main()
