"""Triton's administration closed to clients: who loads models or maps memory needs a key.

The key is made at each start and lies in the control folder, readable by the server's user only. It
is on tritonserver's command line as well, where users of the same machine can see it.
"""

import os
import secrets
from pathlib import Path

KEY_FILE = "admin-key"
HEADER = "chairlift-admin-key"
GRPC_HEADER = f"triton-grpc-protocol-{HEADER}"
# Loading models, mapping the server's memory, writing its log and trace files. What clients and
# perf_analyzer read (health, metadata, configs, statistics) stays open.
CLOSED = ("model-repository", "shared-memory", "logging", "trace")


def make_key(control: Path) -> str:
    """A new key, left in the control folder for the one who runs this server."""
    key = secrets.token_urlsafe(24)
    path = control / KEY_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    return key


def restrictions(key: str) -> list[str]:
    """tritonserver's options that ask for the key over HTTP and gRPC."""
    setting = f"{','.join(CLOSED)}:{HEADER}={key}"
    return [f"--http-restricted-api={setting}", f"--grpc-restricted-protocol={setting}"]
