"""`chairlift bench`: load a running server and measure it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.commands.options import ModelName, Url, failures
from chairlift_client.stream import DEFAULT_URL

Milliseconds = float | None


def bench(
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; default 64, or all of the file.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests running at any time.")] = 16,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Poisson arrivals per second instead of --concurrency."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Requests as a JSON array or one JSON object per line.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of made-up prompts.")] = 128,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Tokens they have in common.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answers.")] = 64,
    ignore_eos: Annotated[bool, typer.Option(help="Generate on to the limit.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    slo_ttft: Annotated[
        Milliseconds, typer.Option(help="Milliseconds allowed for the first token.")
    ] = None,
    slo_itl: Annotated[
        Milliseconds, typer.Option(help="Milliseconds allowed per token of a request.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="gRPC streams to share.")] = 4,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent before, not counted.")] = 4,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Send requests to a running server and show TTFT, ITL, throughput and goodput."""
    from rich.console import Console

    from chairlift_client.bench import Pace, Target, as_json, measure, result_table
    from chairlift_client.bench_requests import load_requests, warm_up_requests
    from chairlift_client.errors import GenerateError
    from chairlift_client.load_progress import request_progress
    from chairlift_client.stream import parse_url
    from chairlift_client.timings import Objective

    with failures():
        endpoint = parse_url(url)
        if endpoint.protocol != "grpc":
            raise GenerateError(f"{url}: bench measures over gRPC; give grpc://host:port")
        load = load_requests(
            file,
            requests,
            seed=seed,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            shared_prefix=shared_prefix,
            ignore_eos=ignore_eos,
        )
        objective = Objective.of_milliseconds(slo_ttft, slo_itl)
        pace = Pace(concurrency=concurrency, rate=rate, seed=seed)
        target = Target(endpoint, model, streams, {"temperature": temperature})
        if warmup:
            measure(target, warm_up_requests(warmup), Pace(), objective)
        console = Console()
        with request_progress(console, len(load)) as advance:
            result = measure(target, load, pace, objective, on_ended=advance)
        console.print(result_table(result, objective))
        if out is not None:
            out.write_text(json.dumps(as_json(result), indent=1) + "\n")
        if result.errors:
            raise GenerateError("; ".join(result.errors[:3]))
