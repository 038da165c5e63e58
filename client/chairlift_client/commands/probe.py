"""`chairlift probe`: startup, readiness and liveness for Kubernetes."""

from enum import Enum
from typing import Annotated

import typer


class Kind(str, Enum):
    """What is asked."""

    startup = "startup"
    readiness = "readiness"
    liveness = "liveness"


def probe(
    kind: Kind,
    url: Annotated[str, typer.Option(help="The server's HTTP address.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The model's name on the server.")] = "llm",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
    heartbeat_timeout: Annotated[float, typer.Option(help="Seconds of silence allowed.")] = 30.0,
) -> None:
    """Exit 0 when the server passes, 1 with the reason when it does not."""
    from chairlift_client.probe import Target, check

    target = Target(url, model, timeout, heartbeat_timeout)
    failure = check(kind.value, target)
    if failure is not None:
        typer.echo(f"{kind.value}: {failure}", err=True)
        raise typer.Exit(1)
