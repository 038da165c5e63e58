"""What a process and all its descendants have used."""

from __future__ import annotations

from pathlib import Path

import psutil


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree, user and system, with children that have ended."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def peak_rss_bytes(pid: int) -> int:
    """The sum of each living process's largest resident set."""
    return sum(_high_water_mark(process.pid) for process in tree(pid))


def _high_water_mark(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
