"""`chairlift profile`: where a running server's time goes."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.commands.options import ControlFolder, failures


def profile(
    steps: Annotated[int, typer.Argument(min=1, max=200, help="How many steps.")] = 20,
    control: ControlFolder = None,
    output: Annotated[Path | None, typer.Option(help="Copy the files to this new folder.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the steps.")] = 120.0,
) -> None:
    """Profile the next steps of a server on this machine; it must have requests to work on."""
    from chairlift_client.errors import SetupError
    from chairlift_client.profile import order_profile

    with failures():
        if control is None:
            raise SetupError("give --control, the folder that `chairlift serve` names at its start")
        folder = order_profile(control, steps, timeout)
        if output is not None:
            folder = Path(shutil.copytree(folder, output))
        typer.echo((folder / "operators.txt").read_text())
        typer.echo(f"{folder}: operators.txt, steps.jsonl, and trace.json (open it in Perfetto)")
