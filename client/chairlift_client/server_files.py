"""Find a tritonserver, and give its Python backend the stub of the running interpreter."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

from chairlift_client.errors import SetupError
from chairlift_client.paths import cache_root, checkout_root

STUB = "triton_python_backend_stub"
PYTHON_TAG = f"{sys.version_info.major}.{sys.version_info.minor}"


class ServerFiles(NamedTuple):
    """A tritonserver that can run; `backends` is None where the server knows its own."""

    executable: Path
    backends: Path | None
    environment: dict[str, str]


def find_server(environ: Mapping[str, str], cache: Path | None = None) -> ServerFiles:
    """The tritonserver on PATH, else the one in nvidia-pytriton, ready to start.

    Raises SetupError when there is none, or when it does not fit this Python.
    """
    on_path = shutil.which("tritonserver", path=environ.get("PATH"))
    if on_path:
        executable = Path(on_path).resolve()
        stub = executable.parents[1] / "backends" / "python" / STUB
        check_stub_version(stub)
        files = ServerFiles(executable, None, _environment(environ, []))
    else:
        package = _pytriton()
        stub_dir = package / "tritonserver" / "python_backend_stubs" / PYTHON_TAG
        check_pip_environment(stub_dir)
        backends = _stage(package, stub_dir, cache or cache_root() / "backends")
        stub = backends / "python" / STUB
        libraries = [package.parent / "nvidia_pytriton.libs"]
        environment = _environment(environ, libraries)
        files = ServerFiles(package / "tritonserver/bin/tritonserver", backends, environment)
    for program in (files.executable, stub):
        _check_libraries(program, files.environment)
    return files


def check_pip_environment(stub_dir: Path) -> None:
    """Refuse an environment in which the pip server's stub cannot run.

    The stub of release 24.10 dies at its first BYTES input under numpy 2. Raises SetupError.
    """
    if not (stub_dir / STUB).is_file():
        found = sorted(p.name for p in stub_dir.parent.glob("3.*"))
        raise SetupError(
            f"nvidia-pytriton has no Python backend stub for Python {PYTHON_TAG} "
            f"(it has {', '.join(found) or 'none'}); use Python 3.10, 3.11 or 3.12"
        )
    version = metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise SetupError(
            f"numpy {version} breaks the tritonserver from pip: pip install 'numpy<2' "
            "(a container's own tritonserver works with numpy 2)"
        )


def check_stub_version(stub: Path) -> None:
    """Refuse an installed server whose stub is linked to another Python. Raises SetupError."""
    if not stub.is_file():
        return
    linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if linked and linked[1].decode() != PYTHON_TAG:
        raise SetupError(
            f"the Python backend of the tritonserver on PATH runs Python {linked[1].decode()}, "
            f"this is Python {PYTHON_TAG}: install chairlift into the former"
        )


def _pytriton() -> Path:
    spec = util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            "no tritonserver on PATH and none from pip: run `make setup`, or "
            "pip install --no-deps nvidia-pytriton==0.7.0"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def _stage(package: Path, stub_dir: Path, cache: Path) -> Path:
    """Copy the backend and the stub side by side into the cache; site-packages stays untouched."""
    stat = (stub_dir / STUB).stat()
    target = cache / f"{metadata.version('nvidia-pytriton')}-py{PYTHON_TAG}-{stat.st_mtime_ns:x}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "backends"
        shutil.copytree(
            package / "tritonserver" / "backends" / "python",
            made / "python",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        shutil.copy2(stub_dir / STUB, made / "python" / STUB)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _environment(environ: Mapping[str, str], libraries: list[Path]) -> dict[str, str]:
    """The server's environment: this Python's library, interpreter and packages first.

    The embedded interpreter takes its prefix, and so this virtual environment's packages, from
    the first python3 on PATH. A checkout's kernels go before an installed copy.
    """
    root = checkout_root()
    python_lib = sysconfig.get_config_var("LIBDIR")
    library_path = [*([python_lib] if python_lib else []), *map(str, libraries)]
    return {
        **environ,
        "PATH": _joined([str(Path(sys.prefix) / "bin")], environ.get("PATH")),
        "LD_LIBRARY_PATH": _joined(library_path, environ.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined([str(root / "kernels")] if root else [], environ.get("PYTHONPATH")),
    }


def _joined(first: list[str], rest: str | None) -> str:
    return os.pathsep.join([*first, *([rest] if rest else [])])


def _check_libraries(program: Path, environment: Mapping[str, str]) -> None:
    """Ask the loader for missing libraries before it dies without a word. Raises SetupError."""
    ldd = shutil.which("ldd", path=environment["PATH"])
    if ldd is None or not program.is_file():
        return
    listing = subprocess.run([ldd, program], env=environment, capture_output=True, text=True)
    missing = re.findall(r"(\S+) => not found", listing.stdout)
    for library in missing:
        python = re.match(r"libpython(3\.\d+)", library)
        hint = f": apt-get install libpython{python[1]}" if python else ""
        raise SetupError(f"{program.name} needs {library}, which is not installed{hint}")
