"""Memory and latency over time, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from .footprint import Footprint
from .traffic import Note

MIB = 1 << 20


def plot(path: Path, samples: Sequence[Footprint], notes: Sequence[Note]) -> None:
    """Three rows: memory against its first sample, what is held, and latencies."""
    figure, (memory, held, latency) = plt.subplots(3, 1, figsize=(9, 9), sharex=True)
    minutes = [sample.at / 60 for sample in samples]
    for name, label in (
        ("stubs", "engine (stubs)"),
        ("server", "tritonserver"),
        ("supervisor", "supervisor"),
        ("shared", "shared memory"),
    ):
        values = [getattr(sample, name) / MIB for sample in samples]
        memory.plot(minutes, [v - values[0] for v in values], label=f"{label}: {values[0]:.0f} MiB")
    memory.set_ylabel("MiB since the first sample")
    for name, label in (("files", "open files"), ("threads", "threads")):
        held.plot(minutes, [getattr(sample, name) for sample in samples], label=label)
    held.plot(minutes, [sample.open_requests for sample in samples], label="open requests")
    held.plot(minutes, [sample.blocks_used for sample in samples], label="KV blocks in use")
    held.set_ylabel("number")
    done = [note for note in notes if note.end == "done"]
    latency.scatter([n.at / 60 for n in done], [n.total for n in done], s=3, label="whole answer")
    firsts = [(n.at / 60, n.first) for n in done if n.first is not None]
    latency.scatter([t for t, _ in firsts], [s for _, s in firsts], s=3, label="first chunk")
    latency.set_yscale("log")
    latency.set_ylabel("seconds")
    latency.set_xlabel("minutes")
    for axes in (memory, held, latency):
        axes.legend(loc="upper left", fontsize=8)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
