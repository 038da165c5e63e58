"""Where a checkout, the caches and the model repository lie."""

import os
from pathlib import Path

from chairlift_client.errors import SetupError

REPOSITORY_VARIABLE = "CHAIRLIFT_MODEL_REPOSITORY"


def checkout_root() -> Path | None:
    """The folder of the source tree this package is run from, or None when it is installed."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "model_repository").is_dir() else None


def cache_root() -> Path:
    """The user's cache folder for what is derived and can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chairlift"


def models_root() -> Path:
    """Where prepared models are kept: beside the source tree when there is one."""
    root = checkout_root()
    return root / "models" if root else cache_root() / "models"


def find_model_repository(given: Path | None) -> Path:
    """The model repository to serve.

    Raises SetupError when none is given and none lies in the usual places.
    """
    root = checkout_root()
    variable = os.environ.get(REPOSITORY_VARIABLE)
    if given:
        candidates = [given]
    elif variable:
        candidates = [Path(variable)]
    else:
        candidates = [
            Path.cwd() / "model_repository",
            *([root / "model_repository"] if root else []),
        ]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()
    raise SetupError(
        f"no model repository at {candidates[0]}: give --model-repository or set "
        f"{REPOSITORY_VARIABLE}"
    )
