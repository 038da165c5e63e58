"""What `chairlift tune` shows: each trial as it ends, and the curve it followed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from chairlift_client.tune import Result
from chairlift_client.tune_search import Trial

BAR_WIDTH = 30


def report_trial(console: Console, trial: Trial) -> None:
    """One line for a trial that has ended."""
    settings = " ".join(f"{name}={value}" for name, value in trial.settings.items())
    score = "failed" if trial.score is None else f"{trial.score:.2f} good requests/s"
    mark = "[bold green]best[/] " if trial.is_best else "     "
    console.print(f"{mark}{settings}: {score} ({trial.note})", highlight=False, soft_wrap=True)


def show_curve(console: Console, result: Result) -> None:
    """All trials in order, with a bar each; the path taken is marked."""
    table = Table(title=f"goodput at {result.rate:.2f} arrivals/s", title_justify="left", box=None)
    names = list(result.best.settings)
    for heading in ("trial", *names, "requests/s", ""):
        table.add_column(heading, justify="left" if heading == "" else "right")
    top = max((trial.score or 0.0) for trial in result.trials) or 1.0
    for number, trial in enumerate(result.trials, 1):
        bar = "█" * round((trial.score or 0.0) / top * BAR_WIDTH)
        if trial.is_best:
            bar = f"[bold green]{bar}[/]"
        score = "failed" if trial.score is None else f"{trial.score:.2f}"
        values = [str(trial.settings[name]) for name in names]
        table.add_row(str(number), *values, score, bar)
    console.print(table)
    settings = ", ".join(f"{name} {value}" for name, value in result.best.settings.items())
    console.print(f"best: {settings}", highlight=False)
