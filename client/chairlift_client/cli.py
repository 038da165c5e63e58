"""`chairlift`: the command line; each command's work lies in a module of its own."""

from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.errors import GenerateError, SetupError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Serve a language model with continuous batching, and talk to it."""


def _fail(error: Exception, code: int) -> typer.Exit:
    from rich.console import Console

    Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
    return typer.Exit(code)


@app.command()
def serve(
    model: Annotated[str | None, typer.Option(help="Folder, .gguf file or hub id.")] = None,
    model_repository: Annotated[Path | None, typer.Option(help="What tritonserver loads.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option()] = 8000,
    grpc_port: Annotated[int, typer.Option()] = 8001,
    metrics_port: Annotated[int, typer.Option()] = 8002,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    batching: Annotated[str, typer.Option(help="continuous, dynamic or static.")] = "continuous",
    wire: Annotated[str, typer.Option(help="triton, or vllm for vllm_backend's ranks.")] = "triton",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", help="An engine setting, key=value; repeatable.")
    ] = None,
    load_timeout: Annotated[float, typer.Option(help="Seconds to load the model.")] = 1800.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds for running requests.")] = 30.0,
    heartbeat_timeout: Annotated[float, typer.Option(help="Seconds of silence allowed.")] = 30.0,
    log_verbose: Annotated[int, typer.Option(help="tritonserver's verbosity.")] = 0,
    server_arg: Annotated[
        list[str] | None, typer.Option(help="Passed to tritonserver as it is; repeatable.")
    ] = None,
    greet: Annotated[bool, typer.Option(help="Stream a first answer when ready.")] = True,
) -> None:
    """Start a server and keep it running until Ctrl-C or SIGTERM."""
    from rich.console import Console

    from chairlift_client.models import resolve_model
    from chairlift_client.paths import find_model_repository
    from chairlift_client.serve import serve as run
    from chairlift_client.settings import ServeSettings, parse_assignments

    console = Console()
    try:
        engine = parse_assignments(assignments or [])
        repository = find_model_repository(model_repository)
        settings = ServeSettings(
            repository=repository,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            batching=batching,
            wire=wire,
            engine={
                **({"device": device} if device else {}),
                **resolve_model(model, repository, console),
                **engine,
            },
            load_timeout=load_timeout,
            drain_timeout=drain_timeout,
            heartbeat_timeout=heartbeat_timeout,
            log_verbose=log_verbose,
            server_args=tuple(server_arg or ()),
        )
        code = run(settings, console, greet=greet)
    except SetupError as error:
        raise _fail(error, 2) from None
    raise typer.Exit(code)
