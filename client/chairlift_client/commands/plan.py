"""`chairlift plan`: how many requests fit on a device, from a model's config alone."""

import os
import subprocess
import sys

import typer

from chairlift_client.commands.options import failures


def plan(context: typer.Context) -> None:
    """Print weights, KV bytes per token, pool size, and how many requests fit; needs no GPU.

    Example: chairlift plan --model Qwen/Qwen3-8B --gpu h200. All options: chairlift plan -h
    """
    from chairlift_client.paths import find_model_repository

    with failures():
        folder = find_model_repository(None) / "llm" / "1"
    done = subprocess.run(
        [sys.executable, "-m", "chairlift.plan", *context.args],
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=False,
    )
    raise typer.Exit(done.returncode)
