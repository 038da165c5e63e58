"""Every engine that can be compared: what runs it, in which environment, with which settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .environments import OPENVINO, TRANSFORMERS, VLLM, Cache
from .paths import ENGINE, PEERS, PERF, ROOT


class Launch(NamedTuple):
    """A driver's interpreter, its options, and its environment variables."""

    python: Path
    options: Mapping[str, Any]
    variables: Mapping[str, str]


class EngineSpec(NamedTuple):
    """``bits`` is the width of the weights in matrix products: engines of 16 are compared, others
    are listed beside them. ``is_ours`` marks Chairlift's own entries."""

    driver: str
    bits: int
    launch: Callable[[Cache, Path], Launch]
    is_ours: bool = False


def _own(options: Mapping[str, Any]) -> Callable[[Cache, Path], Launch]:
    folders = (PERF, ENGINE, ROOT / "kernels", ROOT / "client")
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    return lambda cache, model: Launch(Path(sys.executable), options, path)


def _vllm(cache: Cache, model: Path) -> Launch:
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Launch(cache.python(VLLM), {}, variables)


def _openvino(weights: str) -> Callable[[Cache, Path], Launch]:
    def launch(cache: Cache, model: Path) -> Launch:
        python = cache.python(OPENVINO)
        return Launch(python, {"folder": str(cache.openvino_model(model, weights))}, {})

    return launch


def _transformers(options: Mapping[str, Any]) -> Callable[[Cache, Path], Launch]:
    return lambda cache, model: Launch(cache.python(TRANSFORMERS), options, {})


def _llama(weights: str) -> Callable[[Cache, Path], Launch]:
    def launch(cache: Cache, model: Path) -> Launch:
        program, gguf = cache.llama_server(), cache.gguf_model(model, weights)
        options = {"program": str(program), "gguf": str(gguf)}
        return Launch(Path(sys.executable), options, {})

    return launch


ENGINES: Mapping[str, EngineSpec] = {
    "chairlift": EngineSpec("chairlift_engine.py", 16, _own({}), is_ours=True),
    "chairlift-server": EngineSpec("chairlift_server.py", 16, _own({}), is_ours=True),
    "chairlift-server-4": EngineSpec(
        "chairlift_server.py", 16, _own({"stream_interval": 4}), is_ours=True
    ),
    "vllm": EngineSpec("vllm_cpu.py", 16, _vllm),
    "openvino-fp16": EngineSpec("openvino_genai_cb.py", 16, _openvino("fp16")),
    "openvino-int8": EngineSpec("openvino_genai_cb.py", 8, _openvino("int8")),
    "llama.cpp-bf16": EngineSpec("llama_cpp.py", 16, _llama("bf16")),
    "llama.cpp-q8": EngineSpec("llama_cpp.py", 8, _llama("q8_0")),
    "transformers-cb": EngineSpec("transformers_cb.py", 16, _transformers({})),
    "transformers-static-8": EngineSpec(
        "transformers_static.py", 16, _transformers({"batch_size": 8})
    ),
    "transformers-static-32": EngineSpec(
        "transformers_static.py", 16, _transformers({"batch_size": 32})
    ),
}


def driver_command(spec: EngineSpec, launch: Launch, model: Path, threads: int) -> list[str]:
    """How the driver's process is started, but for its options."""
    return [
        *(str(launch.python), str(PEERS / spec.driver)),
        *("--model", str(model), "--threads", str(threads)),
    ]


def driver_environment(launch: Launch, threads: int) -> dict[str, str]:
    """Every library is told the number of threads; hubs are not asked for anything."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    offline["TOKENIZERS_PARALLELISM"] = "false"
    return {**inherited, **dict.fromkeys(names, str(threads)), **offline, **launch.variables}
