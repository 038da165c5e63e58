"""`chairlift serve`."""

from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.commands.options import failures

Seconds = Annotated[float, typer.Option(min=0.0, metavar="SECONDS")]
Port = Annotated[int, typer.Option(min=1, max=65535)]
Repeated = list[str] | None


def serve(
    model: Annotated[str | None, typer.Option(help="Folder, .gguf file or hub id.")] = None,
    model_repository: Annotated[Path | None, typer.Option(help="What tritonserver loads.")] = None,
    model_name: Annotated[str, typer.Option(help="The folder in it that is llm renamed.")] = "llm",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Port = 8002,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    batching: Annotated[str, typer.Option(help="continuous, dynamic or static.")] = "continuous",
    wire: Annotated[str, typer.Option(help="triton, or vllm for vllm_backend's ranks.")] = "triton",
    triton_queue: Annotated[
        bool, typer.Option(help="Queue in Triton: its priorities, timeouts and size limit act.")
    ] = False,
    assign: Annotated[Repeated, typer.Option("--set", help="Engine setting, key=value.")] = None,
    load_timeout: Seconds = 1800.0,
    drain_timeout: Seconds = 30.0,
    heartbeat_timeout: Seconds = 30.0,
    log_verbose: Annotated[int, typer.Option(help="tritonserver's verbosity.")] = 0,
    server_arg: Annotated[Repeated, typer.Option(help="Passed on to tritonserver.")] = None,
    open_admin: Annotated[
        bool, typer.Option(help="Let any client load models, map shared memory, and set logs.")
    ] = False,
    greet: Annotated[bool, typer.Option(help="Stream a first answer when ready.")] = True,
) -> None:
    """Start a server and keep it running until Ctrl-C or SIGTERM."""
    from rich.console import Console

    from chairlift_client.models import resolve_model
    from chairlift_client.paths import find_model_repository
    from chairlift_client.serve import serve as run
    from chairlift_client.settings import ServeSettings, parse_assignments

    console = Console()
    with failures():
        repository = find_model_repository(model_repository)
        engine = parse_assignments(assign or []) | ({"device": device} if device else {})
        settings = ServeSettings(
            repository=repository,
            model_name=model_name,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            batching=batching,
            wire=wire,
            triton_queue=triton_queue,
            engine=engine,
            load_timeout=load_timeout,
            drain_timeout=drain_timeout,
            heartbeat_timeout=heartbeat_timeout,
            log_verbose=log_verbose,
            server_args=tuple(server_arg or ()),
            open_admin=open_admin,
        )
        code = run(
            settings, console, lambda: resolve_model(model, repository, console), greet=greet
        )
    raise typer.Exit(code)
