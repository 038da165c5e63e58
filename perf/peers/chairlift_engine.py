"""Chairlift's engine alone, in process."""

from __future__ import annotations

from collections.abc import Sequence

from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve
from measuring.own_engine import OwnEngine
from measuring.workload import WorkRequest


class Chairlift:
    def __init__(self, settings: Settings) -> None:
        self._engine = OwnEngine(
            {"model": str(settings.model), "threads": settings.threads, **settings.options}
        )

    def versions(self) -> dict[str, str]:
        return package_versions("chairlift", "torch", "transformers")

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        uids = self._engine.submit([WorkRequest(*request) for request in requests])
        self._engine.wait()
        answers = []
        for uid, trace in zip(uids, self._engine.take(uids), strict=True):
            times = [arrival.time - trace.sent for arrival in trace.arrivals]
            answers.append(Answer(times, [1] * len(times), self._engine.token_ids.pop(uid)))
        return answers


def make(settings: Settings) -> PeerEngine:
    return Chairlift(settings)


if __name__ == "__main__":
    serve(make)
