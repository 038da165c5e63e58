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
    "genai-perf": (
        *("jinja2==3.1.6", "numpy==2.4.6", "orjson==3.13.0", "pandas==3.1.1", "pillow==13.0.0"),
        *("plotly==7.1.0", "pyyaml==6.0.4", "requests==2.34.2", "rich==15.0.0"),
        *("soundfile==0.14.0", "tqdm==4.70.1", "transformers==5.24.0"),
    ),
}

# Installed after those, and without what they say they need: for the modes that are tested,
# genai-perf imports 80 MB of the 188 MB that it asks for.
BARE: dict[str, tuple[str, ...]] = {"genai-perf": ("genai-perf==0.0.16",)}


def client_python(name: str) -> Path:
    """The interpreter of the environment that has the named client, which is made if missing."""
    requirements, bare = REQUIREMENTS[name], BARE.get(name, ())
    wanted = (sys.version_info[:2], requirements + bare)
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "chairlift" / "clients" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs of the tests must not make it at once
        if not (folder / "complete").exists():
            venv.create(folder, clear=True, with_pip=True)
            install = [python, "-m", "pip", "install", "-q"]
            subprocess.run([*install, *requirements], check=True)
            if bare:
                subprocess.run([*install, "--no-deps", *bare], check=True)
            (folder / "complete").touch()
    return python


if __name__ == "__main__":
    for each in REQUIREMENTS:
        print(each, client_python(each))
