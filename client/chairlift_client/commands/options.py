"""Options that several commands share, and how a command fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.errors import GenerateError, SetupError

Url = Annotated[
    str, typer.Option(envvar="CHAIRLIFT_URL", help="grpc://host:port or http://host:port.")
]
ModelName = Annotated[str, typer.Option("--model", help="The model's name on the server.")]
MaxTokens = Annotated[int, typer.Option(help="Length limit of the answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset is the server's.")]
TopP = Annotated[float | None, typer.Option(help="Probability mass to sample from.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds for the whole answer.")]
Parameters = Annotated[
    list[str] | None, typer.Option("--set", help="Any other input, key=value; repeatable.")
]

ControlFolder = Annotated[
    Path | None,
    typer.Option(
        "--control", envvar="CHAIRLIFT_CONTROL_DIR", help="The folder that `serve` names."
    ),
]


@contextmanager
def failures() -> Iterator[None]:
    """Turn an expected error into one line and an exit code: 2 for the set-up, 1 for a request."""
    try:
        yield
    except (SetupError, GenerateError) as error:
        from rich.console import Console

        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, SetupError) else 1) from None
