#!/usr/bin/env python3
"""All results as one HTML page with plots: `python perf/report.py`.

Reads perf/results/*.json and *.md, draws PNG files into perf/results/plots, and writes
perf/results/index.html.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from measuring.comparison import load_comparison
from measuring.html import from_markdown, page
from measuring.paths import RESULTS
from measuring.plots import plot_comparison, plot_latency_profile, plot_load, plot_modes

FIRST = ("compare", "modes", "latency_profile", "streams", "prefix", "waste")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    folder: Path = parser.parse_args().results
    plots = folder / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    sections = []
    for path in sorted(folder.glob("*.md"), key=lambda each: _place(each.stem)):
        images = [
            f'<img src="plots/{image.name}" alt="{image.stem}">'
            for image in draw(path.with_suffix(".json"), plots)
        ]
        sections.append("\n".join([from_markdown(path.read_text()), *images]))
    out = folder / "index.html"
    out.write_text(page("Chairlift, measured", sections))
    print(f"{len(sections)} results in {out}")


def _place(name: str) -> tuple[int, str]:
    return (FIRST.index(name) if name in FIRST else len(FIRST), name)


def draw(path: Path, plots: Path) -> list[Path]:
    """The plots of one result; none for a result that is a table and nothing more."""
    if not path.is_file():
        return []
    if path.stem.startswith("compare"):
        return plot_comparison(path.stem, load_comparison(path), plots)
    if path.stem == "modes":
        return plot_modes(json.loads(path.read_text())["data"], plots)
    if path.stem == "latency_profile":
        return plot_latency_profile(json.loads(path.read_text())["data"], plots)
    if path.stem.startswith("load-"):
        return plot_load(path.stem, json.loads(path.read_text())["data"], plots)
    return []


if __name__ == "__main__":
    main()
