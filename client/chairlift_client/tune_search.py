"""Coordinate descent over ladders of settings, within a budget of trials."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Settings = Mapping[str, int]


class Trial(NamedTuple):
    """Settings that were tried and their score, higher is better; None where no server came up."""

    settings: Settings
    score: float | None
    note: str
    is_best: bool


class Search:
    """Walks one setting at a time, up its ladder and then down, as long as the score grows.

    A step must gain at least ``min_gain`` of the best score, so that noise does not lead the way.
    No settings are tried twice, and none that ``is_allowed`` refuses.
    """

    def __init__(
        self,
        ladders: Mapping[str, Sequence[int]],
        score: Callable[[Settings], tuple[float | None, str]],
        *,
        budget: int,
        min_gain: float = 0.03,
        is_allowed: Callable[[Settings], bool] = lambda settings: True,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ) -> None:
        self.trials: list[Trial] = []
        self._ladders = ladders
        self._score = score
        self._budget = budget
        self._min_gain = min_gain
        self._is_allowed = is_allowed
        self._on_trial = on_trial
        self._best: Trial | None = None

    def run(self, start: Settings) -> Trial | None:
        """The best trial, the start among them; None where not even the start came up."""
        if self._try(start):
            improved = True
            while improved and not self._is_spent:
                improved = sum(self._walk(name) for name in self._ladders) > 0
        return self._best

    @property
    def _is_spent(self) -> bool:
        return len(self.trials) >= self._budget

    def _walk(self, name: str) -> bool:
        """Follow one setting while it helps; whether it did at all."""
        return self._climb(name, 1) or self._climb(name, -1)

    def _climb(self, name: str, direction: int) -> bool:
        improved = False
        while (candidate := self._neighbour(name, direction)) is not None and self._try(candidate):
            improved = True
        return improved

    def _neighbour(self, name: str, direction: int) -> Settings | None:
        """The best settings with one of them a rung higher or lower."""
        assert self._best is not None
        current = self._best.settings[name]
        ladder = self._ladders[name]
        beyond = [rung for rung in ladder if (rung - current) * direction > 0]
        if not beyond:
            return None
        return {**self._best.settings, name: min(beyond) if direction > 0 else max(beyond)}

    def _try(self, settings: Settings) -> bool:
        """Whether these settings are the new best."""
        tried = any(trial.settings == settings for trial in self.trials)
        if tried or self._is_spent or not self._is_allowed(settings):
            return False
        score, note = self._score(settings)
        best = None if self._best is None else self._best.score
        is_best = score is not None and (best is None or score > best * (1 + self._min_gain))
        trial = Trial(settings, score, note, is_best)
        self.trials.append(trial)
        self._on_trial(trial)
        if is_best:
            self._best = trial
        return is_best
