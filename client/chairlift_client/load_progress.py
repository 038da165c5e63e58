"""How far a load test is, on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def request_progress(console: Console, number: int) -> Iterator[Callable[[], None]]:
    """A bar over ``number`` requests; what it yields is called when one has ended."""
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("requests", total=number)
        yield lambda: progress.advance(task)
