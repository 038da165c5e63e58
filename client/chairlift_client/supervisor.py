"""Start, watch, drain and restart one server; every clock, wait and process is passed in."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from chairlift_client.control import Heartbeat, process_is_alive

POLL_SECONDS = 0.2


class Server(Protocol):
    """A server process as the supervisor needs it."""

    def exit_code(self) -> int | None: ...
    def is_ready(self) -> bool: ...
    def load_error(self) -> str | None: ...
    def terminate(self) -> None: ...
    def destroy(self) -> None: ...


class Control(Protocol):
    """The control folder as the supervisor needs it."""

    def reset(self) -> None: ...
    def request_drain(self, timeout: float) -> None: ...
    def heartbeat(self) -> Heartbeat | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds; the engine ends what runs at `drain`, within `drain_grace` of it."""

    load: float = 1800.0
    heartbeat: float = 30.0
    drain: float = 30.0
    drain_grace: float = 5.0
    exit: float = 15.0
    restarts: int = 5
    restart_window: float = 600.0
    backoff: float = 0.5


@dataclass(slots=True)
class StopRequest:
    """Counts stop signals: the first drains, the second ends the drain early."""

    count: int = 0

    def signalled(self) -> None:
        self.count += 1

    @property
    def asked(self) -> bool:
        return self.count > 0

    @property
    def hurried(self) -> bool:
        return self.count > 1


class RestartBudget:
    """Allows so many restarts in a window, each after twice the wait of the one before."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._times: deque[float] = deque()

    def take(self) -> float | None:
        """Seconds to wait before the next restart, or None when the budget is spent."""
        now = self._clock()
        while self._times and now - self._times[0] > self._limits.restart_window:
            self._times.popleft()
        if len(self._times) >= self._limits.restarts:
            return None
        delay = self._limits.backoff * 2.0 ** len(self._times)
        self._times.append(now)
        return delay


class HeartbeatWatch:
    """Judges heartbeats by the supervisor's own clock, so that a set wall clock kills nothing."""

    def __init__(
        self,
        limit: float,
        clock: Callable[[], float],
        is_alive: Callable[[int], bool] = process_is_alive,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._is_alive = is_alive
        self._last: float | None = None
        self._changed = clock()

    def failure(self, heartbeat: Heartbeat | None) -> str | None:
        """Why the engine must be given up, or None."""
        if heartbeat is not None:
            if heartbeat.state == "unhealthy":
                return "the engine says that it is unhealthy"
            if not self._is_alive(heartbeat.pid):
                return f"the stub process {heartbeat.pid} is gone"
            if heartbeat.time != self._last:
                self._last = heartbeat.time
                self._changed = self._clock()
        silence = self._clock() - self._changed
        if silence > self._limit:
            return f"no heartbeat from the engine for {silence:.0f} s"
        return None


class Serving(NamedTuple):
    """The parts a supervisor works with."""

    launch: Callable[[], Server]
    control: Control
    clock: Callable[[], float]
    wait: Callable[[float], None]
    report: Callable[[str], None]
    on_first_ready: Callable[[], None]


class Supervisor:
    """Keeps one server alive until told to stop; `run` returns the exit code."""

    def __init__(self, parts: Serving, limits: Limits, stop: StopRequest) -> None:
        self._parts = parts
        self._limits = limits
        self._stop = stop
        self._budget = RestartBudget(limits, parts.clock)

    def run(self) -> int:
        """Serve until a stop is asked for (0), or until the server cannot be kept alive (1)."""
        has_served = False
        while True:
            self._parts.control.reset()
            server = self._parts.launch()
            try:
                failure = self._wait_until_ready(server)
                if failure is None and not self._stop.asked:
                    if not has_served:
                        has_served = True
                        self._parts.on_first_ready()
                    failure = self._watch(server)
                    if failure is None:
                        self._drain(server)
            finally:
                server.destroy()
            if self._stop.asked:
                return 0
            if not has_served:
                reason = server.load_error() or failure
                self._parts.report(f"the server did not start: {reason}")
                return 1
            if not self._may_restart(failure):
                return 0 if self._stop.asked else 1

    def _may_restart(self, failure: str | None) -> bool:
        delay = self._budget.take()
        if delay is None:
            self._parts.report(
                f"{failure}; given up after {self._limits.restarts} restarts "
                f"in {self._limits.restart_window:.0f} s"
            )
            return False
        self._parts.report(f"{failure}; restarting in {delay:.1f} s")
        self._pause(delay)
        return not self._stop.asked

    def _pause(self, seconds: float) -> None:
        deadline = self._parts.clock() + seconds
        while not self._stop.asked and (left := deadline - self._parts.clock()) > 0:
            self._parts.wait(min(POLL_SECONDS, left))

    def _wait_until_ready(self, server: Server) -> str | None:
        """Wait for the model; the reason of a failure, or None when ready or asked to stop."""
        deadline = self._parts.clock() + self._limits.load
        while not self._stop.asked:
            if (code := server.exit_code()) is not None:
                return f"tritonserver ended with exit code {code} while loading"
            if server.is_ready():
                return None
            if self._parts.clock() > deadline:
                return f"the model was not ready after {self._limits.load:.0f} s"
            self._parts.wait(POLL_SECONDS)
        return None

    def _watch(self, server: Server) -> str | None:
        """Watch a ready server; the reason of its failure, or None when asked to stop."""
        watch = HeartbeatWatch(self._limits.heartbeat, self._parts.clock)
        while not self._stop.asked:
            failure = self._failure(server, watch)
            if failure is not None:
                return failure
            self._parts.wait(POLL_SECONDS)
        return None

    def _failure(self, server: Server, watch: HeartbeatWatch) -> str | None:
        if (code := server.exit_code()) is not None:
            return f"tritonserver ended with exit code {code}"
        return watch.failure(self._parts.control.heartbeat())

    def _drain(self, server: Server) -> None:
        """Let the engine finish what runs, then let tritonserver unload and exit."""
        self._parts.report("stopping: finishing the running requests (again to hurry)")
        self._parts.control.request_drain(self._limits.drain)
        watch = HeartbeatWatch(self._limits.heartbeat, self._parts.clock)
        deadline = self._parts.clock() + self._limits.drain + self._limits.drain_grace
        while not self._stop.hurried and self._parts.clock() < deadline:
            heartbeat = self._parts.control.heartbeat()
            if heartbeat is not None and heartbeat.state == "drained":
                break
            if (failure := self._failure(server, watch)) is not None:
                self._parts.report(f"the drain ended early: {failure}")
                return
            self._parts.wait(POLL_SECONDS)
        self._let_exit(server)

    def _let_exit(self, server: Server) -> None:
        """Give tritonserver time to unload its models; who hurries is not made to wait for it."""
        server.terminate()
        deadline = self._parts.clock() + self._limits.exit
        while not self._stop.hurried and self._parts.clock() < deadline:
            if server.exit_code() is not None:
                return
            self._parts.wait(POLL_SECONDS)
