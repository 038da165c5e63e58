"""Results as JSON and Markdown, with what they belong to."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from perf.gpu.timing import Bench, Table, Value


def machine(bench: Bench) -> dict[str, str]:
    """What the figures belong to."""
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "no GPU, a trial run"
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"device": name, **versions, "python": platform.python_version()}


def markdown(title: str, head: dict[str, str], tables: Sequence[Table]) -> str:
    """One table each, columns in order of first appearance, shares as percentages."""
    lines = [f"# {title}", "", ", ".join(f"{k} {v}" for k, v in head.items()), ""]
    for table in tables:
        columns = list(dict.fromkeys(name for row in table.rows for name in row))
        lines += [f"## {table.title}", "", table.note, ""]
        if columns:
            lines += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        for row in table.rows:
            cells = (_cell(name, row.get(name, "")) for name in columns)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(name: str, value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.0%}" if name.startswith("of ") else f"{value:.4g}"
    return str(value)


def write_tables(title: str, bench: Bench, tables: Sequence[Table], out: Path) -> None:
    """``out`` with .json and .md; also to standard output."""
    head = machine(bench)
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": head, "tables": [table._asdict() for table in tables]}
    out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    text = markdown(title, head, tables)
    out.with_suffix(".md").write_text(text)
    print(text, flush=True)
