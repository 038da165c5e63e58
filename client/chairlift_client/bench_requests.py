"""The requests of a load test: made up, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift_client.errors import SetupError
from chairlift_client.load import LoadRequest
from chairlift_client.stream import Value

# Common words, each one token in nearly every tokenizer; the server reports the true counts.
COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body information back"
)

DEFAULT_NUMBER = 64
NAMES = {"prompt": "text_input", "prompt_token_ids": "input_ids"}
PROMPTS = ("text_input", "input_ids", "messages")


def load_requests(
    file: Path | None,
    number: int | None,
    *,
    seed: int,
    prompt_tokens: int,
    max_tokens: int,
    shared_prefix: int,
    ignore_eos: bool,
) -> list[LoadRequest]:
    """The file's requests, or made-up ones. Raises SetupError for a file that cannot be used."""
    if file is not None:
        requests = from_file(file, number, max_tokens)
    else:
        requests = made_up(
            number or DEFAULT_NUMBER,
            prompt_tokens,
            max_tokens,
            random.Random(seed),
            shared_prefix=shared_prefix,
        )
    parameters = {"ignore_eos": True} if ignore_eos else {}
    return [LoadRequest(request.inputs, parameters) for request in requests]


def made_up(
    number: int,
    prompt_tokens: int,
    max_tokens: int,
    rng: random.Random,
    *,
    shared_prefix: int = 0,
) -> list[LoadRequest]:
    """Prompts of about so many tokens of random words; the first ``shared_prefix`` are common."""
    vocabulary = COMMON_WORDS.split()
    prefix = rng.choices(vocabulary, k=min(shared_prefix, prompt_tokens))
    requests = []
    for _ in range(number):
        words = prefix + rng.choices(vocabulary, k=prompt_tokens - len(prefix))
        requests.append(LoadRequest({"text_input": " ".join(words), "max_tokens": max_tokens}))
    return requests


def from_file(path: Path, number: int | None, max_tokens: int) -> list[LoadRequest]:
    """Read a JSON array or one JSON object per line, over and over until there are ``number``.

    An object has a prompt (`text_input`, `prompt`, `messages`, `input_ids` or `prompt_token_ids`)
    and any other input of the model; ``max_tokens`` is for those that do not say. Raises SetupError
    with the place of what cannot be used.
    """
    entries = _entries(path)
    if not entries:
        raise SetupError(f"{path}: no requests")
    requests = [
        _request(entry, f"{path}: request {index}", max_tokens)
        for index, entry in enumerate(entries, 1)
    ]
    wanted = number or len(requests)
    return (requests * -(-wanted // len(requests)))[:wanted]


def warm_up_requests(number: int) -> list[LoadRequest]:
    """A few short requests whose prompts no measured one shares."""
    return made_up(number, 16, 8, random.Random("warm-up"))


def _entries(path: Path) -> Sequence[object]:
    try:
        text = path.read_text()
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from error
    try:
        if text.lstrip().startswith("["):
            whole: list[object] = json.loads(text)
            return whole
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise SetupError(f"{path}: not JSON: {error}") from error


def _request(entry: object, place: str, max_tokens: int) -> LoadRequest:
    if not isinstance(entry, Mapping):
        raise SetupError(f"{place}: expected an object with a prompt")
    inputs: dict[str, Any] = {
        NAMES.get(str(name), str(name)): value for name, value in entry.items()
    }
    given = [name for name in PROMPTS if name in inputs]
    if len(given) != 1:
        raise SetupError(f"{place}: expected one prompt ({', '.join(PROMPTS)}), found {given}")
    if "messages" in inputs and not isinstance(inputs["messages"], str):
        inputs["messages"] = json.dumps(inputs["messages"], ensure_ascii=False)
    checked: dict[str, Value] = {"max_tokens": max_tokens, **inputs}
    return LoadRequest(checked)
