"""How many threads the engine computes with is a setting."""

from __future__ import annotations

import pytest

from chairlift import assembly
from chairlift.config import EngineConfig


class Stop(Exception):
    """The weights are not needed here."""


@pytest.mark.parametrize(("threads", "expected"), [(0, []), (3, [3])])
def test_H9_torch_gets_the_threads_that_are_set_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: list[int]
) -> None:
    """0 leaves torch its own choice, a thread per physical core."""
    given: list[int] = []

    def load(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(assembly.torch, "set_num_threads", given.append)
    monkeypatch.setattr(assembly.loader, "load", load)
    with pytest.raises(Stop):
        assembly.build(EngineConfig(threads=threads), lambda _: None, lambda: 0.0)
    assert given == expected
