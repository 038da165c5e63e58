"""Results as they are kept: JSON for programs, and Markdown with the same figures for people."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .machine import describe_commit, describe_machine, versions

PACKAGES = ("torch", "transformers", "triton", "nvidia-pytriton", "tritonclient", "numpy")


def about(**extra: object) -> dict[str, Any]:
    """When, on what machine and with which versions something was measured."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": describe_commit(),
        "machine": describe_machine(),
        "versions": versions(PACKAGES),
        **extra,
    }


def about_lines(facts: Mapping[str, Any]) -> list[str]:
    """The same as a Markdown list."""
    return [f"- {key}: {shown(value)}" for key, value in facts.items()]


def shown(value: object) -> str:
    """A value of JSON in words."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(each)}" for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value)


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; floats with three significant digits."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def save(
    path: Path, title: str, facts: Mapping[str, Any], data: object, text: Sequence[str]
) -> None:
    """Write ``path``.json with the data and ``path``.md with the text, and print the latter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"title": title, "about": facts, "data": data}, indent=1)
    path.with_suffix(".json").write_text(content + "\n")
    markdown = "\n".join([f"# {title}", "", *about_lines(facts), "", *text]) + "\n"
    path.with_suffix(".md").write_text(markdown)
    print(markdown)
