"""`chairlift trace`: record every step of a running server for a while."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.commands.options import ControlFolder, failures


def trace(
    seconds: Annotated[float, typer.Argument(min=0.1, help="How long to record.")] = 10.0,
    control: ControlFolder = None,
    output: Annotated[Path, typer.Option(help="Where the trace goes.")] = Path("trace.json"),
) -> None:
    """Record the steps of a server on this machine as a timeline for Perfetto or Chrome."""
    from chairlift_client.errors import SetupError
    from chairlift_client.profile import record_trace

    with failures():
        if control is None:
            raise SetupError("give --control, the folder that `chairlift serve` names at its start")
        shutil.copy(record_trace(control, seconds), output)
    typer.echo(f"{output}: open it at ui.perfetto.dev or chrome://tracing")
