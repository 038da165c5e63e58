"""Who has gone, and whose time is over: every client is asked in turn, for a share of the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.answers import Answer, ClientRequest
from chairlift.client_watch import ClientWatch
from chairlift.errors import RequestError
from chairlift.open_requests import OpenRequests
from chairlift.tensors import Array

ASKING_S = 0.001
ROUND_TRIP_S = 0.0002


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Client:
    """Answers after a round trip, and counts how often it was asked."""

    def __init__(self, clock: Clock) -> None:
        self.gone = False
        self.asked: list[float] = []
        self._clock = clock

    def send(self, outputs: Mapping[str, Array], *, final: bool) -> None:
        raise AssertionError

    def fail(self, error: RequestError, *, final: bool) -> None:
        raise AssertionError

    def is_cancelled(self) -> bool:
        self._clock.now += ROUND_TRIP_S
        self.asked.append(self._clock.now)
        return self.gone


class Engine:
    def __init__(self) -> None:
        self.ended: list[tuple[int, str]] = []

    def abort(self, group: int, error: RequestError | None = None) -> None:
        assert error is not None
        self.ended.append((group, error.message))


class Bench:
    def __init__(self) -> None:
        self.clock, self.engine, self.open = Clock(), Engine(), OpenRequests()
        self.watch = ClientWatch(self.open, self.engine, self.clock, ASKING_S)
        self.clients: list[Client] = []

    def arrive(self, group: int, deadline: float | None = None) -> ClientRequest:
        client = Client(self.clock)
        self.clients.append(client)
        request = ClientRequest(client, "", deadline, self.clock(), groups=[group], open_rows=1)
        self.open.add(request)
        return request

    def round(self) -> None:
        self.clock.now += 0.05
        self.watch.look()


def test_few_clients_are_asked_in_every_round() -> None:
    bench = Bench()
    for group in range(3):
        bench.arrive(group)
    for _ in range(10):
        bench.round()
    assert [len(client.asked) for client in bench.clients] == [10, 10, 10]


def test_many_take_turns_for_a_share_of_the_time_and_newcomers_do_not_overtake() -> None:
    bench = Bench()
    for group in range(100):
        bench.arrive(group)
    for number in range(40):
        bench.arrive(100 + number)
        before = bench.clock()
        bench.watch.look()
        assert bench.clock() - before < ASKING_S + 2 * ROUND_TRIP_S
        bench.clock.now += 0.05
    times_asked = [len(client.asked) for client in bench.clients[:100]]
    assert min(times_asked) >= 1 and max(times_asked) <= min(times_asked) + 1


def test_a_round_asks_at_least_once_however_long_it_takes() -> None:
    bench = Bench()
    bench.watch = ClientWatch(bench.open, bench.engine, bench.clock, asking_s=0.0)
    for group in range(3):
        bench.arrive(group)
    for _ in range(6):
        bench.round()
    assert [len(client.asked) for client in bench.clients] == [2, 2, 2]


def test_who_has_gone_is_ended_once_and_not_asked_again() -> None:
    bench = Bench()
    for group in range(2):
        bench.arrive(group)
    bench.clients[1].gone = True
    for _ in range(3):
        bench.round()
    assert bench.engine.ended == [(1, "Request was cancelled")]
    assert [len(client.asked) for client in bench.clients] == [3, 1]


def test_every_deadline_counts_in_every_round() -> None:
    bench = Bench()
    for group in range(50):
        bench.arrive(group, deadline=100.2 if group % 2 else None)
    for _ in range(2):
        bench.round()
    assert bench.engine.ended == []
    for _ in range(3):
        bench.round()
    expired = [(group, "Request timeout expired") for group in range(1, 50, 2)]
    assert bench.engine.ended == expired


def test_all_rows_of_a_client_end_with_it() -> None:
    bench = Bench()
    request = bench.arrive(0)
    request.groups.append(16)
    bench.clients[0].gone = True
    bench.round()
    assert [group for group, _ in bench.engine.ended] == [0, 16]


def test_a_closed_request_is_not_asked() -> None:
    bench = Bench()
    request = bench.arrive(0)
    request.open_rows = 0
    closed: Any = type("Closed", (), {"client": request})()
    answer: Answer = closed
    bench.open.remove(answer)
    bench.round()
    assert bench.clients[0].asked == []
