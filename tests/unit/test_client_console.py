"""What `chairlift serve` shows of the log, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from chairlift_client.console import StartupLog, introduce
from chairlift_client.settings import ServeSettings

ROUTINE = 'I1130 15:20:10.268250 7302 model_lifecycle.cc:472] "loading: llm:1"'
TABLE = "| llm   | 1       | READY  |"
NO_GPU = 'W1130 15:20:11.672273 7302 metrics.cc:798] "DCGM unable to start"'
MODEL = 'I1130 15:44:22.773942 17464 model.py:32] "KV pool: 11649 blocks [of 16]"'
WARNING = 'W1130 15:20:10.266567 7302 somewhere.cc:1] "mind [bold]this[/bold]"'
TRACEBACK = "ValueError: no such thing"
LINES = (ROUTINE, TABLE, NO_GPU, MODEL, WARNING, TRACEBACK)


def shown(*, terminal: bool, has_gpu: bool = False, ready: bool = False) -> list[str]:
    """The lines that are still there when the moving line is gone."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=200, color_system=None)
    with StartupLog(console, has_gpu=has_gpu) as log:
        if ready:
            log.ready()
        printed = []
        console.print = lambda text, **_: printed.append(text)  # type: ignore[method-assign]
        for line in LINES:
            log.line(line)
    return [line for line in printed if isinstance(line, str)]  # the cursor's controls aside


def test_a_terminal_shows_what_matters_of_the_start() -> None:
    assert shown(terminal=True) == [MODEL, WARNING, TRACEBACK]


def test_a_machine_with_a_gpu_hears_what_is_wrong_with_it() -> None:
    assert shown(terminal=True, has_gpu=True) == [NO_GPU, MODEL, WARNING, TRACEBACK]


@pytest.mark.parametrize(("terminal", "ready"), [(False, False), (True, True)])
def test_everything_is_shown_elsewhere_and_later(terminal: bool, ready: bool) -> None:
    assert shown(terminal=terminal, ready=ready) == list(LINES)


def test_log_lines_are_no_markup() -> None:
    file = io.StringIO()
    StartupLog(Console(file=file, width=20), has_gpu=False).line(WARNING)
    assert file.getvalue() == WARNING + "\n"


def test_examples_fit_the_server_and_a_failed_greeting_is_told(tmp_path: object) -> None:
    file = io.StringIO()
    settings = ServeSettings(repository=tmp_path, host="0.0.0.0", http_port=4, grpc_port=1)  # type: ignore[arg-type]
    introduce(settings, Console(file=file, width=40), greet=True)
    assert "no first answer:" in file.getvalue()
    assert "curl -N http://127.0.0.1:4/v2/models/llm/generate_stream" in file.getvalue()
    assert 'generate("grpc://127.0.0.1:1"' in file.getvalue()
