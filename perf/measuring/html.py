"""The Markdown that results are written in -> HTML: headings, lists, tables, and paragraphs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }
td, th { border: 1px solid #cfd8dc; padding: .25em .6em; text-align: left }
th { background: #eceff1 }
img { max-width: 100%; display: block }
section { border-top: 2px solid #1565c0; margin-top: 2.5em }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole document."""
    body = "\n".join(f"<section>\n{section}\n</section>" for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body>\n<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def from_markdown(text: str) -> str:
    """The part of Markdown that results use."""
    lines = []
    for kind, group in groupby(text.splitlines(), _kind):
        lines += list(_block(kind, list(group)))
    return "\n".join(lines)


def _kind(line: str) -> str:
    for kind, start in (("table", "|"), ("list", "- "), ("heading", "#")):
        if line.startswith(start):
            return kind
    return "text" if line.strip() else "empty"


def _block(kind: str, lines: list[str]) -> Iterator[str]:
    if kind == "table":
        yield "<table>"
        for number, line in enumerate(lines):
            if number != 1:
                tag = "th" if number == 0 else "td"
                cells = line.strip().strip("|").split("|")
                yield "<tr>" + "".join(f"<{tag}>{_inline(c)}</{tag}>" for c in cells) + "</tr>"
        yield "</table>"
    elif kind == "list":
        yield "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
    elif kind == "heading":
        for line in lines:
            depth = len(line) - len(line.lstrip("#")) + 1
            yield f"<h{depth}>{_inline(line.lstrip('#'))}</h{depth}>"
    elif kind == "text":
        yield f"<p>{_inline(' '.join(lines))}</p>"


def _inline(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text.strip()))
