"""`chairlift chat`: one question, or a conversation."""

import sys
from collections.abc import Callable, Generator
from contextlib import closing
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
from chairlift_client.errors import GenerateError
from chairlift_client.stream import DEFAULT_URL, Message

Answer = Callable[[list[Message]], Generator[str, None, None]]


def chat(
    prompt: Annotated[str | None, typer.Argument(help="One question; none to converse.")] = None,
    url: Url = DEFAULT_URL,
    model: ModelName = "llm",
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    timeout: Timeout = None,
    parameters: Parameters = None,
) -> None:
    """Chat with the model: Ctrl-C ends an answer, /reset the conversation, Ctrl-D the session."""
    from chairlift_client.settings import parse_assignments
    from chairlift_client.stream import generate

    with failures():
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            **parse_assignments(parameters or []),
        }

        def answer(messages: list[Message]) -> Generator[str, None, None]:
            return generate(url, messages=messages, model=model, timeout=timeout, **sampling)

        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if prompt is None and sys.stdin.isatty():
            converse(answer, opening)
        else:
            question = sys.stdin.read() if prompt in (None, "-") else str(prompt)
            say(answer, [*opening, {"role": "user", "content": question}])


def say(answer: Answer, messages: list[Message]) -> str:
    """Print an answer as it comes and return it; Ctrl-C cancels it and keeps what came."""
    pieces: list[str] = []
    with closing(answer(messages)) as stream:
        try:
            for piece in stream:
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [cancelled]", end="")
        finally:
            print()
    return "".join(pieces)


def converse(answer: Answer, opening: list[Message]) -> None:
    """Ask and answer until the input ends; an error ends one answer, not the conversation."""
    from rich.console import Console

    console = Console()
    messages = list(opening)
    while True:
        try:
            question = console.input("[bold cyan]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/reset":
            messages = list(opening)
        elif question:
            asked: list[Message] = [*messages, {"role": "user", "content": question}]
            try:
                reply = say(answer, asked)
                messages = [*asked, {"role": "assistant", "content": reply}]
            except GenerateError as error:
                console.print(f"[bold red]error:[/] {error}", highlight=False)
