"""Pictures of results: one function per kind of result file, each returns the files it drew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from .comparison import SINGLE_STREAM, Comparison
from .rounds import Figures

OURS, OTHERS, NARROW = "#1565c0", "#90a4ae", "#cfd8dc"


def plot_comparison(stem: str, comparison: Comparison, folder: Path) -> list[Path]:
    """A bar per engine and workload with the range over rounds; the single stream has its floor."""
    drawn = []
    for workload, engines in sorted(comparison.results.items()):
        single = workload == SINGLE_STREAM
        figure, axes = plt.subplots(figsize=(8, 0.45 * len(engines) + 1.2))
        ordered = sorted(engines, key=lambda name: _middle(engines[name], single), reverse=single)
        for place, name in enumerate(ordered):
            values = [_figure(each, single) for each in engines[name].values()]
            is_ours = name in comparison.ours
            color = OURS if is_ours else OTHERS if comparison.bits[name] >= 16 else NARROW
            axes.barh(place, median(values), color=color)
            axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1)
            axes.text(median(values), place, f" {median(values):.3g}", va="center")
        axes.set_yticks(range(len(ordered)), _with_bits(comparison, ordered))
        axes.set_xlabel("ms per token (less is better)" if single else "output tokens/s")
        axes.set_title(f"Workload {workload}")
        if single and comparison.bandwidth:
            axes.axvline(comparison.floor_ms, color="red", linestyle="--")
        drawn.append(_save(figure, folder / f"{stem}-{workload}.png"))
    return drawn


def _with_bits(comparison: Comparison, names: Sequence[str]) -> list[str]:
    return [f"{n} ({comparison.bits[n]} bit)" if comparison.bits[n] < 16 else n for n in names]


def _figure(figures: Figures, single: bool) -> float:
    return figures.ms_per_token if single else figures.tokens_per_second


def _middle(rounds: dict[int, Figures], single: bool) -> float:
    return median(_figure(each, single) for each in rounds.values())


def plot_modes(data: dict[str, Any], folder: Path) -> list[Path]:
    """Throughput and occupied seats with everything at once; first tokens with Poisson arrivals."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    panels = (
        ("closed", "tokens_per_second", "output tokens/s, all at once"),
        ("closed", "seats_occupied", "share of seats occupied"),
        ("poisson", "ttft_p50_ms", "median TTFT ms, Poisson"),
    )
    for axis, (part, field, title) in zip(axes, panels, strict=True):
        modes = data[part]
        values = {mode: median(run[field] for run in runs) for mode, runs in modes.items()}
        axis.bar(list(values), list(values.values()), color=[NARROW, OTHERS, OURS])
        axis.set_title(title, fontsize=10)
    return [_save(figure, folder / "modes.png")]


def plot_load(name: str, data: dict[str, Any], folder: Path) -> list[Path]:
    """Throughput and the time to first token over the levels of a load."""
    levels = list(data)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    left.plot(levels, [data[level]["tokens_per_second"] for level in levels], "o-", color=OURS)
    left.set_title("output tokens/s", fontsize=10)
    for field, color in (("p50", OURS), ("p99", OTHERS)):
        spreads = [data[level]["ttft"] for level in levels]
        values = [spread[field] * 1e3 if spread else 0.0 for spread in spreads]
        right.plot(levels, values, "o-", color=color, label=field)
    right.set_title("TTFT ms", fontsize=10)
    right.legend()
    for axis in (left, right):
        axis.tick_params(axis="x", rotation=45, labelsize=8)
        axis.set_ylim(bottom=0)
    return [_save(figure, folder / f"{name}.png")]


def plot_latency_profile(data: dict[str, Any], folder: Path) -> list[Path]:
    """Each settings profile by how steady its streams are and what throughput it leaves."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for name, runs in data["runs"].items():
        x = median(run["throughput"] for run in runs)
        y = median(run["itl_ratio"] for run in runs)
        axes.plot(x, y, "o", color=OURS)
        axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axes.axhline(3.0, color="red", linestyle="--")
    axes.set_xlabel("output tokens/s on workload A")
    axes.set_ylabel("p99 / median of ITL, long prompts arriving")
    axes.set_ylim(bottom=0)
    return [_save(figure, folder / "latency_profile.png")]


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
