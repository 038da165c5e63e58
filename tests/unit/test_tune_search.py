"""The search of tune, over made-up landscapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chairlift_client.tune import LADDERS, START, fits_together, settings_json
from chairlift_client.tune_search import Search, Settings

LADDER = {"a": (1, 2, 4, 8, 16), "b": (1, 2, 3)}


def search(score: Callable[[Settings], float | None], budget: int = 99) -> Search:
    return Search(LADDER, lambda settings: (score(settings), ""), budget=budget)


def test_it_finds_the_top_of_a_hill_in_two_settings() -> None:
    found = search(lambda s: 100 - abs(s["a"] - 8) * 5 - abs(s["b"] - 1) * 7)
    best = found.run({"a": 2, "b": 2})
    assert best is not None
    assert best.settings == {"a": 8, "b": 1}


def test_it_goes_back_to_a_setting_when_another_one_has_moved() -> None:
    table = {(1, 1): 10, (1, 2): 12, (2, 2): 15, (2, 1): 9, (2, 3): 20, (4, 3): 30}
    found = search(lambda s: table.get((s["a"], s["b"]), 1))
    best = found.run({"a": 1, "b": 1})
    assert best is not None
    assert best.settings == {"a": 4, "b": 3}


def test_a_gain_within_the_noise_is_none() -> None:
    found = search(lambda s: 100 + s["a"] * 0.1)
    best = found.run({"a": 4, "b": 2})
    assert best is not None
    assert best.settings == {"a": 4, "b": 2}


def test_nothing_is_tried_twice_and_the_budget_holds() -> None:
    tried: list[tuple[int, int]] = []

    def score(settings: Settings) -> float:
        tried.append((settings["a"], settings["b"]))
        return float(settings["a"] * settings["b"])

    search(score).run({"a": 1, "b": 1})
    assert len(tried) == len(set(tried))
    tried.clear()
    search(score, budget=3).run({"a": 1, "b": 1})
    assert len(tried) == 3


def test_settings_that_bring_no_server_up_are_walked_around() -> None:
    found = search(lambda s: None if s["a"] == 4 else float(s["b"] + s["a"] / 100))
    best = found.run({"a": 2, "b": 1})
    assert best is not None
    assert best.settings["b"] == 3
    assert {t.settings["a"] for t in found.trials if t.score is None} == {4}


def test_a_start_that_does_not_come_up_ends_the_search() -> None:
    found = search(lambda s: None)
    assert found.run({"a": 1, "b": 1}) is None
    assert len(found.trials) == 1


def test_the_engine_s_own_rule_is_kept() -> None:
    asked: list[Settings] = []

    def score(settings: Settings) -> tuple[float, str]:
        asked.append(settings)
        return float(settings["max_num_seqs"]), ""

    Search(LADDERS, score, budget=50, is_allowed=fits_together).run(START)
    assert asked and all(fits_together(settings) for settings in asked)
    assert max(settings["max_num_seqs"] for settings in asked) == 256


def test_the_written_settings_are_the_model_s_own_with_the_best_on_top(tmp_path: object) -> None:
    from json import loads
    from pathlib import Path

    from chairlift.config import EngineConfig

    own = Path(str(tmp_path)) / "model.json"
    own.write_text('{"model": "somewhere", "block_size": 16}')
    merged = loads(settings_json(own, {**START, "block_size": 32}))
    assert merged == {"model": "somewhere", **START, "block_size": 32}
    assert EngineConfig.model_validate(merged).block_size == 32


@pytest.mark.parametrize("name", list(LADDERS))
def test_the_start_is_the_engine_s_default_and_on_the_ladder(name: str) -> None:
    from chairlift.config import EngineConfig

    assert getattr(EngineConfig(), name) == START[name]
    assert START[name] in LADDERS[name]
