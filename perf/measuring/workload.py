"""The workload files, and copies of them that no engine's cache has seen."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from .paths import WORKLOADS

# Ids from here on are ordinary words in every tokenizer that the workloads are made with.
FIRST_SALT_ID = 1000
NUM_SALTS = 8000


class WorkRequest(NamedTuple):
    """A prompt, and how many tokens to generate whatever they are."""

    prompt_ids: list[int]
    max_tokens: int


def load_workload(name: str) -> list[WorkRequest]:
    """The requests of perf/workloads/NAME.json."""
    loaded = json.loads((WORKLOADS / f"{name}.json").read_text())
    return [WorkRequest(each["prompt_token_ids"], each["max_tokens"]) for each in loaded]


def fresh(requests: Sequence[WorkRequest], salt: int) -> list[WorkRequest]:
    """The same lengths and the same sharing, but no prefix in common with another salt's copy.

    Every engine here keeps computed prefixes, so a second round would otherwise be another task.
    """
    first = FIRST_SALT_ID + salt % NUM_SALTS
    return [WorkRequest([first, *r.prompt_ids[1:]], r.max_tokens) for r in requests]


def num_output_tokens(requests: Sequence[WorkRequest]) -> int:
    return sum(request.max_tokens for request in requests)
