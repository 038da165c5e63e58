"""`chairlift tune`: settings for the best goodput on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from chairlift_client.commands.options import failures

Milliseconds = float | None


def tune(
    slo_ttft: Annotated[
        Milliseconds, typer.Option(help="Milliseconds allowed for the first token.")
    ] = 1000.0,
    slo_itl: Annotated[
        Milliseconds, typer.Option(help="Milliseconds allowed per token of a request.")
    ] = 100.0,
    model: Annotated[str | None, typer.Option(help="Folder, .gguf file or hub id.")] = None,
    model_repository: Annotated[Path | None, typer.Option(help="What tritonserver loads.")] = None,
    assign: Annotated[
        list[str] | None, typer.Option("--set", help="Engine setting for all trials, key=value.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Arrivals per second; default: a little too many."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many per trial.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Requests as a JSON array or one JSON object per line.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of made-up prompts.")] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length limit of the answers.")] = 64,
    trials: Annotated[int, typer.Option(min=1, help="Servers to try at most.")] = 12,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the settings go.")] = Path("tuned.json"),
) -> None:
    """Try settings on servers of their own and write those with the best goodput to a file.

    The file is a model.json: copy it over model_repository/llm/1/model.json to serve with it.
    """
    from rich.console import Console

    from chairlift_client.bench_requests import load_requests
    from chairlift_client.paths import find_model_repository
    from chairlift_client.settings import parse_assignments
    from chairlift_client.timings import Objective
    from chairlift_client.trial import trial_server
    from chairlift_client.tune import LADDERS, START, Load, Tuner, settings_json
    from chairlift_client.tune_report import report_trial, show_curve

    console = Console()
    with failures():
        repository = find_model_repository(model_repository)
        common = parse_assignments(assign or [])
        load = load_requests(
            file,
            requests,
            seed=seed,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            shared_prefix=0,
            ignore_eos=True,
        )
        tuner = Tuner(
            Load(load, Objective.of_milliseconds(slo_ttft, slo_itl), rate, seed),
            lambda settings: trial_server(
                {**common, **settings}, model=model, model_repository=repository
            ),
            lambda trial: report_trial(console, trial),
        )
        result = tuner.run(START, LADDERS, trials)
        show_curve(console, result)
        out.write_text(settings_json(repository / "llm" / "1" / "model.json", result.best.settings))
        console.print(f"[bold green]written[/] {out}")
