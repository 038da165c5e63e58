"""`chairlift top`: a live view of a running server."""

from typing import Annotated

import typer

from chairlift_client.commands.options import ControlFolder, ModelName, failures

DEFAULT_METRICS = "http://127.0.0.1:8002"


def top(
    metrics: Annotated[str, typer.Option(help="The server's metrics address.")] = DEFAULT_METRICS,
    model: ModelName = "llm",
    control: ControlFolder = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two views.")] = 2.0,
    once: Annotated[bool, typer.Option(help="Print one view and end.")] = False,
) -> None:
    """Watch queue, batch, KV cache, tokens per second, latencies, and the last steps."""
    from rich.console import Console
    from rich.live import Live

    from chairlift_client.control import ControlDir
    from chairlift_client.top import views

    with failures():
        frames = views(metrics, model, ControlDir(control) if control else None, interval)
        with Live(console=Console(), auto_refresh=False, screen=not once) as live:
            try:
                for frame in frames:
                    live.update(frame, refresh=True)
                    if once:
                        return
            except KeyboardInterrupt:
                return
