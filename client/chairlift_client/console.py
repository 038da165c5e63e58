"""What `chairlift serve` shows: the log, a first answer, and lines to paste."""

import re
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text

from chairlift_client.errors import GenerateError
from chairlift_client.settings import ServeSettings

GREETING = "What is the capital of France?"
GREETING_TOKENS = 48
GREETING_SECONDS = 120.0

_ROUTINE = re.compile(r"^(I\d{4} |[+|]|\s*$)")
_NO_GPU = re.compile(r"CUDA driver version is insuff|CudaDriverHelper|initialize NVML|DCGM unable")
_FROM_MODEL = re.compile(r"^I\d{4} \S+ \d+ (model|pb_stub)\.\S+\] ")


class StartupLog:
    """Passes on the server's log; on a terminal the routine of the start is one moving line.

    So are tritonserver's complaints about a missing GPU where the machine has none.
    """

    def __init__(self, console: Console, *, has_gpu: bool) -> None:
        self._console = console
        self._has_gpu = has_gpu
        self._status: Status | None = None

    def __enter__(self) -> "StartupLog":
        if self._console.is_terminal:
            self._status = self._console.status("starting tritonserver")
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ready()

    def ready(self) -> None:
        """Stop the moving line; from here on every line of the log is shown."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def line(self, line: str) -> None:
        """Show a line of the server's log."""
        status = self._status
        if status is not None:
            shown = Text(line, overflow="ellipsis", no_wrap=True, style="dim")
            shown.truncate(max(20, self._console.width - 4))
            status.update(shown)
            if self._is_routine(line):
                return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _is_routine(self, line: str) -> bool:
        if not self._has_gpu and _NO_GPU.search(line):
            return True
        return bool(_ROUTINE.match(line)) and not _FROM_MODEL.match(line)

    def report(self, message: str) -> None:
        """Show what the supervisor does, and why."""
        self._console.print(f"[bold]chairlift:[/] {message}", highlight=False, soft_wrap=True)


def print_addresses(settings: ServeSettings, control: Path, console: Console) -> None:
    """Say where the server is to be found."""
    host = settings.connect_host
    console.print(
        f"[bold green]ready[/] http://{host}:{settings.http_port} "
        f"grpc://{host}:{settings.grpc_port}\n"
        f"metrics http://{host}:{settings.metrics_port}/metrics, control folder {control}",
        highlight=False,
        soft_wrap=True,
    )


def introduce(settings: ServeSettings, console: Console, *, greet: bool) -> None:
    """Stream a first answer, which also warms the model up, and print lines to paste."""
    if greet:
        _stream_greeting(settings, console)
    print_examples(settings, console)


def _stream_greeting(settings: ServeSettings, console: Console) -> None:
    from chairlift_client.stream import generate

    messages = [{"role": "user", "content": GREETING}]
    console.print(f"[bold cyan]> {GREETING}[/]")
    try:
        for text in generate(
            f"grpc://{settings.connect_host}:{settings.grpc_port}",
            messages=messages,
            model=settings.model_name,
            max_tokens=GREETING_TOKENS,
            temperature=0.0,
            timeout=GREETING_SECONDS,
        ):
            console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        console.print()
    except GenerateError as error:
        console.print(f"[yellow]no first answer:[/] {error}", highlight=False)


def print_examples(settings: ServeSettings, console: Console) -> None:
    """Print a curl and a Python call that work as they stand."""
    http = f"http://{settings.connect_host}:{settings.http_port}"
    grpc = f"grpc://{settings.connect_host}:{settings.grpc_port}"
    name = settings.model_name
    console.print(
        f"\ncurl -N {http}/v2/models/{name}/generate_stream "
        f'-d \'{{"text_input": "The sun is", "max_tokens": 32, "stream": true}}\'\n\n'
        "from chairlift_client.stream import generate\n"
        f'for text in generate("{grpc}", messages=[{{"role": "user", "content": "Hello!"}}], '
        'max_tokens=64):\n    print(text, end="", flush=True)\n\n'
        f'chairlift chat --url {grpc} "Why is the sky blue?"    (Ctrl-C here stops the server)\n',
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
