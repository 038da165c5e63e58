"""`chairlift serve`: check this machine, then run a supervised server in the foreground."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from chairlift_client.console import StartupLog, introduce, print_addresses
from chairlift_client.control import CONTROL_VARIABLE, ControlDir
from chairlift_client.errors import SetupError
from chairlift_client.health import why_not_listen
from chairlift_client.server_files import ServerFiles, find_server
from chairlift_client.settings import ServeSettings
from chairlift_client.supervisor import Limits, Serving, StopRequest, Supervisor
from chairlift_client.triton_process import TritonProcess

NVIDIA = Path("/dev/nvidiactl")


def check_ports(settings: ServeSettings) -> None:
    """Refuse a port on which no server can listen. Raises SetupError naming its option."""
    for option, port in settings.ports().items():
        if (reason := why_not_listen(settings.host, port)) is not None:
            raise SetupError(f"cannot use {option} {port} on {settings.host}: {reason}")


def serve(
    settings: ServeSettings,
    console: Console,
    resolve_model: Callable[[], Mapping[str, object]],
    *,
    greet: bool = True,
) -> int:
    """Run a server until SIGINT or SIGTERM; the exit code.

    The model is resolved last: preparing it takes long, and a taken port should be said at once.
    Raises SetupError before the start.
    """
    check_ports(settings)
    files = find_server(os.environ)
    settings = replace(settings, engine={**resolve_model(), **settings.engine})
    stop = StopRequest()
    with (
        _stop_signals(stop),
        _control_dir() as control,
        StartupLog(console, has_gpu=NVIDIA.exists()) as log,
    ):

        def on_first_ready() -> None:
            log.ready()
            print_addresses(settings, control.path, console)
            _in_background(lambda: introduce(settings, console, greet=greet))

        parts = Serving(
            launch=_launcher(settings, files, control, log.line),
            control=control,
            clock=time.monotonic,
            wait=time.sleep,
            report=log.report,
            on_first_ready=on_first_ready,
        )
        return Supervisor(parts, _limits(settings), stop).run()


def _limits(settings: ServeSettings) -> Limits:
    return Limits(
        load=settings.load_timeout,
        heartbeat=settings.heartbeat_timeout,
        drain=settings.drain_timeout,
    )


def _launcher(
    settings: ServeSettings, files: ServerFiles, control: ControlDir, on_line: Callable[[str], None]
) -> Callable[[], TritonProcess]:
    return lambda: TritonProcess(settings, files, control.path, on_line)


def _in_background(action: Callable[[], None]) -> None:
    """Run beside the supervisor, which must go on watching while the model answers."""
    threading.Thread(target=action, name="greeting", daemon=True).start()


@contextmanager
def _stop_signals(stop: StopRequest) -> Iterator[None]:
    """Count SIGINT and SIGTERM; only a flag is touched, so nothing can lock up in the handler."""
    before = {
        number: signal.signal(number, lambda *_: stop.signalled())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _control_dir() -> Iterator[ControlDir]:
    """The folder named by the environment, so that probes find it, else one of our own."""
    given = os.environ.get(CONTROL_VARIABLE)
    if given:
        yield ControlDir(Path(given))
    else:
        with tempfile.TemporaryDirectory(prefix="chairlift-") as path:
            yield ControlDir(Path(path))
