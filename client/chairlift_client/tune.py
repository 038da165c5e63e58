"""Find engine settings for the best goodput on this machine, by trying one server after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from chairlift_client.bench import Measurement, Pace, Target, measure
from chairlift_client.bench_requests import warm_up_requests
from chairlift_client.errors import GenerateError, SetupError
from chairlift_client.load import LoadRequest
from chairlift_client.timings import Objective
from chairlift_client.trial import TrialServer
from chairlift_client.tune_search import Search, Settings, Trial

# The engine's own defaults, which are where the search starts.
START: Settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 32}
LADDERS: Mapping[str, Sequence[int]] = {
    "max_num_batched_tokens": (64, 128, 256, 512, 1024, 2048),
    "max_num_seqs": (4, 8, 16, 32, 64, 128, 256),
    "block_size": (8, 16, 32, 64),
}
NUM_WARM_UP = 4
# Just above what the first server sustains: below that every setting meets the objective alike, and
# far above it no request does.
OVERLOAD = 1.1

StartServer = Callable[[Mapping[str, object]], AbstractContextManager[TrialServer]]


@dataclass(frozen=True, slots=True)
class Load:
    """What every trial has to serve. Without a rate the first trial measures what it sustains."""

    requests: Sequence[LoadRequest]
    objective: Objective
    rate: float | None
    seed: int


class Result(NamedTuple):
    """The best settings, what led there, and the arrivals per second they were tried at."""

    best: Trial
    trials: list[Trial]
    rate: float


class Tuner:
    """Starts a server per candidate, loads it, and scores it by goodput in requests per second."""

    def __init__(
        self, load: Load, start_server: StartServer, report: Callable[[Trial], None]
    ) -> None:
        self._load = load
        self._start_server = start_server
        self._report = report
        self._rate = load.rate

    def run(self, start: Settings, ladders: Mapping[str, Sequence[int]], budget: int) -> Result:
        """Search within ``budget`` trials. Raises SetupError where not even the start came up."""
        search = Search(
            ladders,
            self._score,
            budget=budget,
            is_allowed=fits_together,
            on_trial=self._report,
        )
        best = search.run(start)
        if best is None or self._rate is None:
            raise SetupError(search.trials[0].note)
        return Result(best, search.trials, self._rate)

    def _score(self, settings: Settings) -> tuple[float | None, str]:
        try:
            with self._start_server(dict(settings)) as server:
                result = self._measure(Target(server.grpc, "llm", 4, {"temperature": 0.0}))
        except (SetupError, GenerateError) as error:
            return None, str(error).strip().splitlines()[-1]
        if result.errors:
            return None, result.errors[0]
        return result.summary.goodput, describe(result)

    def _measure(self, target: Target) -> Measurement:
        load = self._load
        measure(target, warm_up_requests(NUM_WARM_UP), Pace(), load.objective)
        if self._rate is None:
            everything = Pace(concurrency=len(load.requests))
            sustained = measure(target, load.requests, everything, load.objective).summary
            self._rate = sustained.requests_per_second * OVERLOAD
        pace = Pace(rate=self._rate, seed=load.seed)
        return measure(target, load.requests, pace, load.objective)


def fits_together(settings: Settings) -> bool:
    """The engine's own rule: every running request needs a token per step."""
    return settings["max_num_batched_tokens"] >= settings["max_num_seqs"]


def describe(result: Measurement) -> str:
    """A trial's figures in one line."""
    summary = result.summary
    parts = [f"{summary.num_good}/{summary.num_requests} good"]
    parts.append(f"{summary.tokens_per_second:.0f} tok/s")
    if summary.ttft is not None:
        parts.append(f"TTFT p99 {summary.ttft.p99 * 1e3:.0f} ms")
    if summary.time_per_token is not None:
        parts.append(f"per token p99 {summary.time_per_token.p99 * 1e3:.1f} ms")
    return ", ".join(parts)


def settings_json(model_json: Path, best: Settings) -> str:
    """The model's own settings file with the settings that were found."""
    own = json.loads(model_json.read_text()) if model_json.is_file() else {}
    return json.dumps({**own, **best}, indent=2) + "\n"
