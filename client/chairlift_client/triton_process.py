"""One tritonserver process: its command line, log, process group and shared memory."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from chairlift_client.admin import make_key, restrictions
from chairlift_client.control import CONTROL_VARIABLE
from chairlift_client.health import is_ready
from chairlift_client.server_files import ServerFiles
from chairlift_client.settings import SETTINGS_VARIABLE, ServeSettings

SHARED_MEMORY = Path("/dev/shm")


def server_command(
    settings: ServeSettings, files: ServerFiles, shm_prefix: str, admin_key: str | None = None
) -> list[str]:
    """tritonserver's command line; with a key its administration is closed to whoever lacks it.

    Our configurations are complete. To complete them tritonserver would start each stub twice and
    import transformers once more: 8 of 23 CPU seconds of a start with the default model.
    """
    command = [
        str(files.executable),
        f"--model-repository={settings.repository}",
        f"--http-address={settings.host}",
        f"--http-port={settings.http_port}",
        f"--grpc-address={settings.host}",
        f"--grpc-port={settings.grpc_port}",
        f"--metrics-address={settings.host}",
        f"--metrics-port={settings.metrics_port}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--backend-config=python,stub-timeout-seconds={int(settings.load_timeout)}",
        f"--log-verbose={settings.log_verbose}",
        # The model's config is complete; completing it would import torch in a process of its own.
    ]
    if files.backends is not None:
        command.append(f"--backend-directory={files.backends}")
    if settings.config_name is not None:
        command.append(f"--model-config-name={settings.config_name}")
    if admin_key is not None:
        command += restrictions(admin_key)
    return command + list(settings.server_args)


class TritonProcess:
    """A running tritonserver with the stubs it started, as one group that ends together."""

    def __init__(
        self,
        settings: ServeSettings,
        files: ServerFiles,
        control: Path,
        on_line: Callable[[str], None],
    ) -> None:
        self._url = f"http://{settings.connect_host}:{settings.http_port}"
        self._model = settings.model_name
        self._shm_prefix = f"chairlift-{os.getpid()}-{secrets.token_hex(4)}-"
        self._on_line = on_line
        self._load_error: str | None = None
        key = None if settings.open_admin else make_key(control)
        self._process = subprocess.Popen(
            _ended_with_parent(server_command(settings, files, self._shm_prefix, key)),
            env={
                **files.environment,
                SETTINGS_VARIABLE: settings.engine_json(),
                CONTROL_VARIABLE: str(control),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_log, name="server-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def is_ready(self) -> bool:
        return is_ready(self._url, self._model)

    def load_error(self) -> str | None:
        """What the log says about a model that did not load."""
        return self._load_error

    def terminate(self) -> None:
        """Ask tritonserver to stop; it unloads its models, so their stubs stop too."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def destroy(self) -> None:
        """Kill whatever is left of the group and take away its shared memory."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=2.0)
        remove_shared_memory(self._shm_prefix, SHARED_MEMORY)

    def _read_log(self) -> None:
        stream: Iterable[str] = self._process.stdout or ()
        for line in stream:
            self._load_error = self._load_error or load_error_in(line)
            self._on_line(line.rstrip("\n"))


def load_error_in(line: str) -> str | None:
    """The reason in the line with which tritonserver reports a model that failed to load."""
    found = re.search(
        r"failed to load '([^']+)' version \d+: (?:\w[\w ]*: )?(.*?)\"?$", line.rstrip()
    )
    return f"{found[1]}: {found[2]}".replace("\\n", "\n") if found else None


def remove_shared_memory(prefix: str, folder: Path) -> None:
    """Delete the regions that a killed server could not delete itself."""
    for region in folder.glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


def _ended_with_parent(command: list[str]) -> list[str]:
    """Have the kernel stop the server when the supervisor is killed, so no orphan keeps the ports.

    The signal comes when the starting thread ends, so start servers from the main thread.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", *command] if setpriv else command
