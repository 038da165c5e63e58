"""The soak's verdict: a leak is seen, noise and settling are not taken for one."""

from __future__ import annotations

import random

import pytest

from perf.soaking.footprint import Footprint
from perf.soaking.traffic import KINDS, Note
from perf.soaking.verdict import latencies, slope, slopes

MIB = 1 << 20
HOUR = [float(second) for second in range(0, 3600, 5)]


def noisy(per_hour: float, noise: float, seed: int) -> list[float]:
    """Memory of 1000 MiB that grows by so much an hour, with a random walk's kind of noise."""
    rng, values, drift = random.Random(seed), [], 0.0
    for time in HOUR:
        drift = 0.9 * drift + rng.gauss(0, noise)
        values.append(1000 * MIB + per_hour * time / 3600 + drift)
    return values


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_measured_and_not_flat(seed: int) -> None:
    found = slope("stubs", HOUR, noisy(100 * MIB, MIB, seed))
    assert found.per_hour == pytest.approx(100 * MIB, rel=0.1)
    assert found.growth == pytest.approx(found.per_hour, rel=0.01)
    assert not found.is_flat


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_flat(seed: int) -> None:
    assert slope("stubs", HOUR, noisy(0.0, MIB, seed)).is_flat


@pytest.mark.parametrize(("growth", "is_flat"), [(1.1, True), (2.9, True), (4.0, False)])
def test_a_small_process_may_settle_by_its_arenas(growth: float, is_flat: bool) -> None:
    times = [float(second) for second in range(80)]
    found = slope("server", times, [(46 + growth * time / 79) * MIB for time in times])
    assert abs(found.growth - growth * MIB) < 0.1 * MIB and found.is_flat == is_flat


def test_a_constant_is_flat() -> None:
    found = slope("shared", HOUR, [2.0 * MIB] * len(HOUR))
    assert (found.per_hour, found.error) == (0.0, 0.0) and found.is_flat


def test_settling_at_the_start_does_not_count() -> None:
    samples = [
        Footprint(t, int(min(t, 900)) * MIB, 5 * MIB, 5 * MIB, 0, 9, 9, 0, 0, 0) for t in HOUR
    ]
    assert all(found.is_flat for found in slopes(samples))


def test_latencies_compare_halves_of_what_ran_to_its_end() -> None:
    notes = [Note(float(t), "grpc", 0.1 if t < 60 else 0.2, 1.0, "done") for t in range(30, 90)]
    notes += [Note(50.0, "cancels", 0.1, 9.0, "left"), Note(50.0, "grpc", None, 9.0, "error")]
    (row,) = latencies(notes, 90.0)
    assert (row.kind, row.first_early, row.first_late, row.number) == ("grpc", 0.1, 0.2, 60)


def test_every_kind_of_client_makes_its_inputs() -> None:
    for kind in KINDS:
        inputs = kind.inputs(random.Random(1))
        assert ("prompt" in inputs) != ("messages" in inputs), kind.name
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 12
