#!/usr/bin/env python3
"""Writes the files of perf/workloads: `make_workloads.py MODEL_DIR [--seed N] [--out DIR]`.

| file | what |
|---|---|
| A | 64 requests at once, log-normal lengths: what a chat service sees |
| B | 32 requests that share their first 200 tokens: a system prompt |
| C | one request: the pace of a single stream |
| D | 8 prompts of 1,500 tokens: documents |
| E | 128 short prompts, one answer in five is long: where static batches wait for their last |
| W | a few requests to warm an engine up |

A file is a list of {prompt_token_ids, max_tokens}. The ids are cut from the English of CPython's
own help texts by the model's tokenizer, so lengths are exact for every engine. Requests are meant
to be decoded greedily past any end token, so that all engines generate the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

Request = dict[str, Any]


class Maker:
    """Draws prompts and lengths; the order of the draws is part of the files' identity."""

    def __init__(self, text_ids: list[int], seed: int) -> None:
        self._ids = text_ids
        self._rng = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        start = self._rng.randrange(len(self._ids) - length)
        return self._ids[start : start + length]

    def length(self, median: float, low: int, high: int) -> int:
        """Log-normal with sigma 0.8, as lengths of real chats are, cut to a range."""
        drawn = median * math.exp(self._rng.gauss(0, 0.8))
        return min(high, max(low, round(drawn)))

    def mixed(self, number: int, max_tokens: int | None = None) -> list[Request]:
        requests = []
        for _ in range(number):
            prompt = self.prompt(self.length(96, 16, 512))
            requests.append(_request(prompt, max_tokens or self.length(64, 8, 256)))
        return requests

    def shared_prefix(self, number: int) -> list[Request]:
        prefix = self.prompt(200)
        return [_request(prefix + self.prompt(32), 32) for _ in range(number)]

    def long_tail(self, number: int) -> list[Request]:
        requests = []
        for _ in range(number):
            prompt = self.prompt(self._rng.randint(16, 48))
            is_long = self._rng.random() < 0.2
            low, high = (192, 320) if is_long else (4, 24)
            requests.append(_request(prompt, self._rng.randint(low, high)))
        return requests

    def all(self) -> dict[str, list[Request]]:
        workloads = {"A": self.mixed(64), "B": self.shared_prefix(32)}
        workloads["C"] = [_request(self.prompt(64), 128)]
        workloads["D"] = [_request(self.prompt(1500), 32) for _ in range(8)]
        workloads["W"] = self.mixed(16, max_tokens=12)
        workloads["E"] = self.long_tail(128)
        return workloads


def _request(prompt: list[int], max_tokens: int) -> Request:
    return {"prompt_token_ids": prompt, "max_tokens": max_tokens}


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "workloads")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model_dir / "tokenizer.json"))
    text = "\n".join(topics[name] for name in sorted(topics))
    text_ids = tokenizer.encode(text, add_special_tokens=False).ids
    args.out.mkdir(parents=True, exist_ok=True)
    for name, requests in Maker(text_ids, args.seed).all().items():
        (args.out / f"{name}.json").write_text(json.dumps(requests))


if __name__ == "__main__":
    main()
