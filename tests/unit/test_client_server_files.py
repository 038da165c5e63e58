"""Finding a server, staging its backend, and saying clearly what is missing."""

import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest

from chairlift_client import server_files
from chairlift_client.errors import SetupError
from chairlift_client.server_files import PYTHON_TAG, STUB, check_pip_environment, find_server


def a_program(path: Path, content: bytes = b"#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip server of three files."""
    folder = tmp_path / "site-packages" / "pytriton"
    a_program(folder / "tritonserver" / "bin" / "tritonserver")
    a_program(folder / "tritonserver" / "backends" / "python" / "libtriton_python.so")
    a_program(folder / "tritonserver" / "python_backend_stubs" / PYTHON_TAG / STUB)
    monkeypatch.setattr(server_files, "_pytriton", lambda: folder)
    versions = {"nvidia-pytriton": "0.7.0", "numpy": "1.26.4"}
    monkeypatch.setattr(metadata, "version", versions.__getitem__)
    return folder


def test_server_from_pip_is_staged_once_outside_site_packages(
    package: Path, tmp_path: Path
) -> None:
    before = sorted(package.rglob("*"))
    cache = tmp_path / "cache"
    files = find_server({"PATH": "/nowhere"}, cache)
    assert files.executable == package / "tritonserver" / "bin" / "tritonserver"
    assert files.backends is not None and cache in files.backends.parents
    assert (files.backends / "python" / "libtriton_python.so").is_file()
    stub = files.backends / "python" / STUB
    made = stub.stat().st_ino
    assert find_server({"PATH": "/nowhere"}, cache).backends == files.backends
    assert stub.stat().st_ino == made
    assert sorted(package.rglob("*")) == before
    assert len(list(cache.iterdir())) == 1


def test_environment_puts_this_python_first(package: Path, tmp_path: Path) -> None:
    environ = {"PATH": "/nowhere", "LD_LIBRARY_PATH": "/theirs", "PYTHONPATH": "/mine", "X": "1"}
    environment = find_server(environ, tmp_path / "cache").environment
    assert environment["PATH"].split(":") == [f"{sys.prefix}/bin", "/nowhere"]
    assert environment["LD_LIBRARY_PATH"].split(":")[-1] == "/theirs"
    assert str(package.parent / "nvidia_pytriton.libs") in environment["LD_LIBRARY_PATH"]
    assert environment["PYTHONPATH"].split(":")[-1] == "/mine"
    assert environment["X"] == "1"


def test_server_on_path_wins_and_keeps_its_backends(package: Path, tmp_path: Path) -> None:
    server = a_program(tmp_path / "opt" / "bin" / "tritonserver")
    files = find_server({"PATH": str(server.parent)}, tmp_path / "cache")
    assert files.executable == server and files.backends is None
    assert not (tmp_path / "cache").exists()


def test_server_on_path_for_another_python_is_refused(package: Path, tmp_path: Path) -> None:
    server = a_program(tmp_path / "opt" / "bin" / "tritonserver")
    a_program(tmp_path / "opt" / "backends" / "python" / STUB, b"..libpython3.2.so.1.0..")
    with pytest.raises(SetupError, match=r"runs Python 3\.2"):
        find_server({"PATH": str(server.parent)}, tmp_path / "cache")


def test_python_without_a_stub_is_refused(package: Path) -> None:
    with pytest.raises(SetupError, match=f"it has {PYTHON_TAG}"):
        check_pip_environment(package / "tritonserver" / "python_backend_stubs" / "3.99")


def test_numpy_2_with_the_pip_server_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.4.0")
    with pytest.raises(SetupError, match=r"numpy 2\.4\.0 .*pip install 'numpy<2'"):
        check_pip_environment(package / "tritonserver" / "python_backend_stubs" / PYTHON_TAG)


def test_missing_library_is_named_with_its_package(package: Path, tmp_path: Path) -> None:
    ldd = a_program(
        tmp_path / "bin" / "ldd", b"#!/bin/sh\necho 'libpython3.11.so.1.0 => not found'\n"
    )
    with pytest.raises(SetupError, match=r"apt-get install libpython3\.11"):
        find_server({"PATH": str(ldd.parent)}, tmp_path / "cache")


def test_no_server_at_all_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_files.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="make setup"):
        find_server({"PATH": "/nowhere"})
