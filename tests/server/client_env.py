"""A Python environment for clients that others wrote, so that their pins never meet ours.

Made once and kept under ~/.cache/chairlift/clients; `python tests/server/client_env.py` makes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

# With the versions that the tests were written against.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "litellm": ("litellm==1.110.2",),
    "llama-index": ("llama-index-llms-nvidia-triton==0.6.0",),
}


def client_python(name: str) -> Path:
    """The interpreter of the environment that has the named client, which is made if missing."""
    requirements = REQUIREMENTS[name]
    digest = hashlib.sha256(repr((sys.version_info[:2], requirements)).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "chairlift" / "clients" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of the tests must not make it at once
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "-q", *requirements], check=True)
            (folder / "complete").touch()
    return python


if __name__ == "__main__":
    for each in REQUIREMENTS:
        print(each, client_python(each))
