"""A comparison's data: every run of every engine, kept as JSON, and drawn up as Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .results import about_lines
from .rounds import Figures, Ratio, medians, ratio

# Lower is better for a single stream, whose figure is the time per token.
SINGLE_STREAM = "C"


class Aim(NamedTuple):
    """What issue and README promise of ``engine`` on a workload: a bound on its ratio to the best
    peer that computes in 16 bits; for the single stream an upper one, on time per token."""

    workload: str
    engine: str
    bound: float


AIMS = (
    Aim("A", "chairlift-server", 1.25),
    Aim("B", "chairlift-server", 1.25),
    Aim("C", "chairlift-server", 0.8),
    Aim("D", "chairlift-server", 1.1),
)
FLOOR_BOUND = 1.5
SERVER_BOUND = 0.92


@dataclass(slots=True)
class Comparison:
    """Results by workload, engine and round; ``failures`` by engine, in its own words.

    ``bandwidth`` is what memory gave in each round, bytes per second; ``idle_cpu`` the share of one
    core that engines not being measured took, at worst.
    """

    about: dict[str, Any]
    weight_bytes: int
    bits: dict[str, int] = field(default_factory=dict)
    ours: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)
    idle_cpu: float = 0.0
    results: dict[str, dict[str, dict[int, Figures]]] = field(default_factory=dict)

    def note(self, workload: str, engine: str, round_number: int, result: Figures) -> None:
        self.results.setdefault(workload, {}).setdefault(engine, {})[round_number] = result

    @property
    def floor_ms(self) -> float:
        """Milliseconds to read all weights once at the bandwidth measured in this run."""
        return self.weight_bytes / median(self.bandwidth) * 1e3

    def best_peer(self, workload: str) -> str | None:
        """The fastest engine of others that computes in 16 bits or more, by medians."""
        peers = {
            name: medians(list(rounds.values()))
            for name, rounds in self.results.get(workload, {}).items()
            if name not in self.ours and self.bits[name] >= 16
        }
        if workload == SINGLE_STREAM:
            return min(peers, key=lambda name: peers[name].ms_per_token, default=None)
        return max(peers, key=lambda name: peers[name].tokens_per_second, default=None)

    def ratio(self, workload: str, over: str, under: str) -> Ratio | None:
        """Tokens per second of one engine over another's; time per token for the single stream."""
        engines = self.results.get(workload, {})
        if over not in engines or under not in engines:
            return None
        return ratio(engines[over], engines[under], _picker(workload))

    def save(self, path: Path) -> None:
        """Write everything as JSON, and the tables beside it as Markdown."""
        path.parent.mkdir(parents=True, exist_ok=True)
        results = {
            workload: {
                engine: {number: each._asdict() for number, each in rounds.items()}
                for engine, rounds in engines.items()
            }
            for workload, engines in self.results.items()
        }
        names = ("about", "weight_bytes", "bits", "ours", "versions", "failures", "checks")
        data = {name: getattr(self, name) for name in (*names, "bandwidth", "idle_cpu")}
        path.write_text(json.dumps({**data, "results": results}, indent=1) + "\n")
        path.with_suffix(".md").write_text(markdown(self))


def load_comparison(path: Path) -> Comparison:
    """Read what `save` wrote."""
    data = json.loads(path.read_text())
    stored = data.pop("results")
    comparison = Comparison(**data)
    for workload, engines in stored.items():
        for engine, rounds in engines.items():
            for number, each in rounds.items():
                comparison.note(workload, engine, int(number), Figures(**each))
    return comparison


def _picker(workload: str) -> Callable[[Figures], float]:
    if workload == SINGLE_STREAM:
        return lambda figures: figures.ms_per_token
    return lambda figures: figures.tokens_per_second


def markdown(comparison: Comparison) -> str:
    """The tables a reader wants: what it ran on, one table per workload, ratios and aims."""
    parts = ["# Chairlift and its peers", *_about(comparison)]
    for workload in sorted(comparison.results):
        parts += ["", f"## Workload {workload}", "", *_workload_table(comparison, workload)]
    parts += ["", "## Ratios", "", *_ratio_table(comparison)]
    if comparison.failures:
        parts += ["", "## Engines that did not run", ""]
        parts += [f"- **{name}**: {_one_line(t)}" for name, t in comparison.failures.items()]
    return "\n".join(parts) + "\n"


def _about(comparison: Comparison) -> list[str]:
    lines = ["", *about_lines(comparison.about)]
    for engine, versions in comparison.versions.items():
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"- {engine} ({comparison.bits[engine]} bit): {shown}")
    if comparison.bandwidth:
        rates = [rate / 1e9 for rate in comparison.bandwidth]
        megabytes = comparison.weight_bytes / 1e6
        lines.append(
            f"- reading {megabytes:.0f} MB, the weights: {median(rates):.1f} GB/s "
            f"({min(rates):.1f}-{max(rates):.1f}), so the floor of a token is "
            f"{comparison.floor_ms:.2f} ms"
        )
    lines.append(f"- engines not being measured took at most {comparison.idle_cpu:.1%} of a core")
    return lines


def _workload_table(comparison: Comparison, workload: str) -> list[str]:
    lines = [
        "| engine | bit | output tok/s (range) | TTFT p50 / p99 ms | ITL p50 / p99 ms "
        "| ms per token | seconds | CPU s (client) | peak RSS MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    engines = comparison.results[workload]
    middle = {name: medians(list(rounds.values())) for name, rounds in engines.items()}
    for name in sorted(engines, key=lambda each: -middle[each].tokens_per_second):
        m, rates = middle[name], [f.tokens_per_second for f in engines[name].values()]
        is_server = name in comparison.ours and name.endswith("server")
        client = f" ({m.driver_cpu_seconds:.2f})" if is_server else ""
        lines.append(
            f"| {name} | {comparison.bits[name]} | {m.tokens_per_second:.0f} "
            f"({min(rates):.0f}-{max(rates):.0f}) | {m.ttft_p50_ms:.0f} / {m.ttft_p99_ms:.0f} "
            f"| {m.itl_p50_ms:.1f} / {m.itl_p99_ms:.1f} | {m.ms_per_token:.2f} | {m.seconds:.2f} "
            f"| {m.cpu_seconds:.1f}{client} | {m.peak_rss_mib:.0f} |"
        )
    return lines


def _ratio_table(comparison: Comparison) -> list[str]:
    """Chairlift against the best 16-bit peer of each workload, against the floor, and its server
    against its engine alone."""
    lines = ["| what | measured, median (range) | aim |", "|---|---|---|"]
    aims = {(aim.workload, aim.engine): aim.bound for aim in AIMS}
    for workload in sorted(comparison.results):
        peer = comparison.best_peer(workload)
        for engine in comparison.ours:
            found = comparison.ratio(workload, engine, peer) if peer else None
            if found is None:
                continue
            quantity = "ms per token" if workload == SINGLE_STREAM else "tok/s"
            sign = "at most" if workload == SINGLE_STREAM else "at least"
            aim = aims.get((workload, engine))
            shown = f"{sign} {aim}" if aim is not None else ""
            lines.append(f"| {workload}: {engine} / {peer}, {quantity} | {found} | {shown} |")
    lines += _floor_lines(comparison)
    for engine in comparison.ours:
        server = comparison.ratio("A", engine, "chairlift") if engine != "chairlift" else None
        if server is not None:
            shown = f"at least {SERVER_BOUND}" if engine == "chairlift-server" else ""
            lines.append(f"| A: {engine} / engine alone, tok/s | {server} | {shown} |")
    return lines


def _floor_lines(comparison: Comparison) -> list[str]:
    lines = []
    for engine, rounds in comparison.results.get(SINGLE_STREAM, {}).items():
        if engine in comparison.ours and comparison.bandwidth:
            quotients = [f.ms_per_token / comparison.floor_ms for f in rounds.values()]
            shown = Ratio(median(quotients), min(quotients), max(quotients))
            lines.append(f"| C: {engine} / floor, ms per token | {shown} | at most {FLOOR_BOUND} |")
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())[-600:]
