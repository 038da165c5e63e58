"""Results as JSON and Markdown, with what they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from perf.gpu.timing import Bench, Table, Value
from perf.measuring.results import about, about_lines, table


def machine(bench: Bench) -> dict[str, Any]:
    """What the figures belong to."""
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "no GPU, a trial run"
    return {"device": name, **about()}


def markdown(title: str, facts: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """One table each, columns in order of first appearance, shares as percentages."""
    lines = [f"# {title}", "", *about_lines(facts), ""]
    for each in tables:
        columns = list(dict.fromkeys(name for row in each.rows for name in row))
        cells = [[_cell(name, row.get(name, "")) for name in columns] for row in each.rows]
        lines += [f"## {each.title}", "", each.note, ""]
        lines += [*table(columns, cells), ""] if columns else [""]
    return "\n".join(lines)


def _cell(name: str, value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("of ") else f"{value:.4g}"
    return str(value)


def write_tables(title: str, bench: Bench, tables: Sequence[Table], out: Path) -> None:
    """``out`` with .json and .md; also to standard output."""
    facts = machine(bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": facts, "tables": [table._asdict() for table in tables]}
    out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    text = markdown(title, facts, tables)
    out.with_suffix(".md").write_text(text)
    print(text, flush=True)
