"""`chairlift generate`: continue a text."""

import sys
from typing import Annotated

import typer

from chairlift_client.commands.options import (
    MaxTokens,
    ModelName,
    Parameters,
    Seed,
    Temperature,
    Timeout,
    TopP,
    Url,
    failures,
)
from chairlift_client.stream import DEFAULT_URL


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    timeout: Timeout = None,
    parameters: Parameters = None,
) -> None:
    """Continue a text, streamed to standard output."""
    from chairlift_client.settings import parse_assignments
    from chairlift_client.stream import generate as stream

    with failures():
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            **parse_assignments(parameters or []),
        }
        text = sys.stdin.read() if prompt == "-" else prompt
        try:
            for piece in stream(url, text, model=model, timeout=timeout, **sampling):
                print(piece, end="", flush=True)
        finally:
            print()
