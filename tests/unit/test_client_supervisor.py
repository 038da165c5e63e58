"""The supervisor's decisions, with a clock and processes made of plain numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from chairlift_client.control import Heartbeat
from chairlift_client.supervisor import (
    HeartbeatWatch,
    Limits,
    RestartBudget,
    Serving,
    StopRequest,
    Supervisor,
)

LIMITS = Limits(load=60.0, heartbeat=30.0, drain=20.0, drain_grace=5.0, exit=10.0)
ME = 1  # process 1 always lives


@dataclass
class World:
    """A fake machine: time passes only in `wait`, where the script's due events happen."""

    ready_after: float = 1.0
    exits_on_terminate: bool = True
    beats: bool = True
    pid: int = ME
    state: str = "serving"
    now: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    servers: list["FakeServer"] = field(default_factory=list)
    drain_timeout: float | None = None
    load_error: str | None = None

    def at(self, when: float, action: Callable[[], None]) -> None:
        self.events.append((when, action))

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        assert self.now < 10_000, "the supervisor never ends"
        due = [e for e in self.events if e[0] <= self.now]
        self.events = [e for e in self.events if e[0] > self.now]
        for _, action in due:
            action()

    def launch(self) -> "FakeServer":
        self.servers.append(FakeServer(self, self.now))
        self.did.append("launch")
        return self.servers[-1]

    def reset(self) -> None:
        self.state = "serving"
        self.drain_timeout = None

    def request_drain(self, timeout: float) -> None:
        self.did.append("drain")
        self.drain_timeout = timeout
        self.state = "draining"

    def heartbeat(self) -> Heartbeat | None:
        time = self.now if self.beats else 0.0
        return Heartbeat(time, self.state, 0, 0, self.pid)


@dataclass
class FakeServer:
    world: World
    born: float
    code: int | None = None

    def exit_code(self) -> int | None:
        return self.code

    def is_ready(self) -> bool:
        return self.world.now - self.born >= self.world.ready_after

    def load_error(self) -> str | None:
        return self.world.load_error

    def terminate(self) -> None:
        self.world.did.append("terminate")
        if self.world.exits_on_terminate:
            self.code = 0

    def destroy(self) -> None:
        self.world.did.append("destroy")


def run(world: World, limits: Limits = LIMITS, stop: StopRequest | None = None) -> int:
    parts = Serving(
        launch=world.launch,
        control=world,
        clock=lambda: world.now,
        wait=world.wait,
        report=world.said.append,
        on_first_ready=lambda: world.did.append("ready"),
    )
    return Supervisor(parts, limits, stop or StopRequest()).run()


def test_a_stop_drains_then_terminates() -> None:
    world, stop = World(), StopRequest()
    world.at(5.0, stop.signalled)
    world.at(8.0, lambda: setattr(world, "state", "drained"))
    assert run(world, stop=stop) == 0
    assert world.did == ["launch", "ready", "drain", "terminate", "destroy"]
    assert world.drain_timeout == LIMITS.drain
    assert 8.0 <= world.now < 9.0


def test_an_engine_that_never_drains_is_ended_at_the_limits() -> None:
    world, stop = World(exits_on_terminate=False), StopRequest()
    world.at(5.0, stop.signalled)
    assert run(world, stop=stop) == 0
    assert world.did[-2:] == ["terminate", "destroy"]
    assert world.now == pytest.approx(5.0 + 20.0 + 5.0 + 10.0, abs=1.0)


def test_a_second_signal_ends_the_drain() -> None:
    world, stop = World(exits_on_terminate=False), StopRequest()
    world.at(5.0, stop.signalled)
    world.at(7.0, stop.signalled)
    assert run(world, stop=stop) == 0
    assert world.did[-2:] == ["terminate", "destroy"]
    assert world.now < 8.0


def test_a_stop_while_loading_does_not_wait() -> None:
    world, stop = World(ready_after=1000.0), StopRequest()
    world.at(5.0, stop.signalled)
    assert run(world, stop=stop) == 0
    assert world.did == ["launch", "destroy"]
    assert world.now < 6.0


def test_a_server_that_dies_in_a_drain_is_not_waited_for() -> None:
    world, stop = World(), StopRequest()
    world.at(5.0, stop.signalled)
    world.at(7.0, lambda: setattr(world.servers[0], "code", -9))
    assert run(world, stop=stop) == 0
    assert world.did == ["launch", "ready", "drain", "destroy"]
    assert "exit code -9" in world.said[-1]


def test_a_first_start_that_fails_is_not_tried_again() -> None:
    world = World(ready_after=1000.0)
    world.at(3.0, lambda: setattr(world.servers[0], "code", 1))
    assert run(world) == 1
    assert world.did == ["launch", "destroy"]
    assert "exit code 1 while loading" in world.said[-1]


def test_a_model_that_fails_to_load_is_reported_in_its_own_words() -> None:
    world = World(ready_after=1000.0, load_error="llm: no such file")
    world.at(3.0, lambda: setattr(world.servers[0], "code", 1))
    assert run(world) == 1
    assert world.said == ["the server did not start: llm: no such file"]


def test_a_model_that_never_gets_ready_is_given_up() -> None:
    world = World(ready_after=1000.0)
    assert run(world) == 1
    assert "not ready after 60 s" in world.said[-1]
    assert world.now == pytest.approx(60.0, abs=1.0)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda w: setattr(w.servers[-1], "code", -11), "exit code -11"),
        (lambda w: setattr(w, "state", "unhealthy"), "unhealthy"),
        (lambda w: setattr(w, "pid", 2**22 + 1), "stub process"),
    ],
)
def test_a_failure_restarts_and_is_named(break_it: Callable[[World], None], reason: str) -> None:
    world, stop = World(), StopRequest()
    world.at(5.0, lambda: break_it(world))
    world.at(5.3, lambda: setattr(world, "pid", ME))
    world.at(20.0, stop.signalled)
    world.at(21.0, lambda: setattr(world, "state", "drained"))
    assert run(world, stop=stop) == 0
    assert world.did.count("launch") == 2 and world.did.count("ready") == 1
    assert reason in world.said[0]
    assert world.servers[1].born < 7.0


def test_a_silent_engine_is_replaced_after_the_limit() -> None:
    world, stop = World(), StopRequest()
    world.at(5.0, lambda: setattr(world, "beats", False))
    world.at(50.0, stop.signalled)
    world.at(51.0, lambda: setattr(world, "state", "drained"))
    run(world, stop=stop)
    assert world.servers[1].born == pytest.approx(5.0 + LIMITS.heartbeat, abs=1.5)
    assert "no heartbeat" in world.said[0]


def test_restarts_back_off_and_end() -> None:
    world = World()

    def crash_all() -> None:
        for server in world.servers:
            if world.now > server.born + world.ready_after + 0.5:
                server.code = 1
        world.at(world.now + 0.1, crash_all)

    world.at(0.1, crash_all)
    assert run(world) == 1
    assert world.did.count("launch") == 1 + LIMITS.restarts
    births = [server.born for server in world.servers]
    gaps = [b - a for a, b in zip(births, births[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] > 8 * LIMITS.backoff
    assert "given up after 5 restarts" in world.said[-1]


def test_budget_forgets_old_restarts() -> None:
    now = [0.0]
    budget = RestartBudget(Limits(restarts=2, restart_window=100.0, backoff=0.5), lambda: now[0])
    assert [budget.take(), budget.take(), budget.take()] == [0.5, 1.0, None]
    now[0] = 101.0
    assert budget.take() == 0.5


def test_heartbeats_are_judged_by_change_not_by_their_clock() -> None:
    now = [0.0]
    watch = HeartbeatWatch(10.0, lambda: now[0], is_alive=lambda pid: True)
    for stamp in (1e9, 5.0, 7e8):  # the wall clock jumps about
        now[0] += 8.0
        assert watch.failure(Heartbeat(stamp, "serving", 0, 0, 1)) is None
    now[0] += 10.5
    assert "no heartbeat" in (watch.failure(Heartbeat(7e8, "serving", 0, 0, 1)) or "")


def test_an_engine_that_never_beats_is_given_up() -> None:
    now = [0.0]
    watch = HeartbeatWatch(10.0, lambda: now[0])
    assert watch.failure(None) is None
    now[0] = 10.5
    assert "no heartbeat" in (watch.failure(None) or "")
