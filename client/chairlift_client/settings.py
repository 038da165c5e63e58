"""What `chairlift serve` was asked for, and how the engine is told."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chairlift_client.errors import SetupError

SETTINGS_VARIABLE = "CHAIRLIFT_SETTINGS"
BATCHING = ("continuous", "dynamic", "static")
WIRES = ("triton", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """One server's settings; times in seconds.

    `engine` holds what goes to the engine as one JSON object, above everything in `model.json`.
    `heartbeat_timeout` must exceed the longest single step, which on a CPU is a full prompt chunk.
    """

    repository: Path
    model_name: str = "llm"
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    batching: str = "continuous"
    wire: str = "triton"
    triton_queue: bool = False
    engine: Mapping[str, object] = field(default_factory=dict)
    load_timeout: float = 1800.0
    drain_timeout: float = 30.0
    heartbeat_timeout: float = 30.0
    log_verbose: int = 0
    server_args: tuple[str, ...] = ()
    open_admin: bool = False

    def __post_init__(self) -> None:
        if self.batching not in BATCHING:
            raise SetupError(f"--batching {self.batching}: choose one of {', '.join(BATCHING)}")
        if self.wire not in WIRES:
            raise SetupError(f"--wire {self.wire}: choose one of {', '.join(WIRES)}")
        if self.wire == "vllm" and self.batching != "continuous":
            raise SetupError("--wire vllm serves continuous batching only")
        if self.triton_queue and (self.batching, self.wire) != ("continuous", "triton"):
            raise SetupError("--triton-queue is for --batching continuous and --wire triton")
        ports = self.ports()
        if len(set(ports.values())) < len(ports):
            raise SetupError(f"the ports must differ: {ports}")

    def ports(self) -> dict[str, int]:
        """Each port under the option that sets it."""
        return {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
        }

    @property
    def config_name(self) -> str | None:
        """The file of `configs/` that tritonserver reads instead of config.pbtxt."""
        if self.wire == "vllm":
            return "vllm"
        if self.triton_queue:
            return "triton_queue"
        return None if self.batching == "continuous" else self.batching

    @property
    def connect_host(self) -> str:
        """The address under which this machine reaches the server."""
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    def engine_json(self) -> str:
        """The engine's settings as the text of CHAIRLIFT_SETTINGS."""
        return json.dumps(dict(self.engine), sort_keys=True)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` options; a value is JSON where it parses as such, else plain text.

    Raises SetupError for an assignment without a key or given twice.
    """
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise SetupError(f"--set {assignment}: expected key=value")
        if key in parsed:
            raise SetupError(f"--set {key} is given twice")
        try:
            parsed[key] = json.loads(text)
        except ValueError:
            parsed[key] = text
    return parsed
