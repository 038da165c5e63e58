"""What the command line may say, and what reaches the engine and tritonserver."""

import json
from pathlib import Path
from typing import Any

import pytest

from chairlift_client.errors import SetupError
from chairlift_client.server_files import ServerFiles
from chairlift_client.settings import ServeSettings, parse_assignments
from chairlift_client.triton_process import load_error_in, remove_shared_memory, server_command

REPOSITORY = Path("/models")


def test_assignments_are_json_where_they_can_be() -> None:
    assert parse_assignments(["a=1", "b=true", "c=[1, 2]", "d=cuda:0", "e=x=y", "f="]) == {
        "a": 1,
        "b": True,
        "c": [1, 2],
        "d": "cuda:0",
        "e": "x=y",
        "f": "",
    }


@pytest.mark.parametrize("wrong", [["a"], ["=1"], ["a=1", "a=2"]])
def test_assignments_that_say_nothing_are_refused(wrong: list[str]) -> None:
    with pytest.raises(SetupError, match="--set"):
        parse_assignments(wrong)


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, None),
        ({"batching": "static"}, "static"),
        ({"batching": "dynamic"}, "dynamic"),
        ({"wire": "vllm"}, "vllm"),
        ({"triton_queue": True}, "triton_queue"),
    ],
)
def test_variants_are_tritons_own_configs(options: dict[str, Any], config: str | None) -> None:
    settings = ServeSettings(repository=REPOSITORY, **options)
    assert settings.config_name == config
    command = server_command(settings, ServerFiles(Path("tritonserver"), None, {}), "p")
    assert [a for a in command if "config-name" in a] == (
        [f"--model-config-name={config}"] if config else []
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batching": "magic"}, "--batching"),
        ({"wire": "carrier-pigeon"}, "--wire"),
        ({"wire": "vllm", "batching": "static"}, "continuous"),
        ({"triton_queue": True, "batching": "static"}, "--triton-queue"),
        ({"triton_queue": True, "wire": "vllm"}, "--triton-queue"),
        ({"http_port": 8001}, "ports must differ"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(SetupError, match=word):
        ServeSettings(repository=REPOSITORY, **options)  # type: ignore[arg-type]


def test_command_line_of_the_server() -> None:
    settings = ServeSettings(
        repository=REPOSITORY, host="0.0.0.0", http_port=1, grpc_port=2, server_args=("--x=y",)
    )
    files = ServerFiles(Path("/bin/tritonserver"), Path("/cache/backends"), {})
    command = server_command(settings, files, "mine")
    assert command[0] == "/bin/tritonserver" and command[-1] == "--x=y"
    assert {
        "--model-repository=/models",
        "--http-address=0.0.0.0",
        "--grpc-address=0.0.0.0",
        "--metrics-address=0.0.0.0",
        "--http-port=1",
        "--grpc-port=2",
        "--metrics-port=8002",
        "--backend-directory=/cache/backends",
        "--backend-config=python,shm-region-prefix-name=mine",
    } <= set(command)
    assert settings.connect_host == "127.0.0.1"


def test_engine_settings_travel_as_one_json_object() -> None:
    settings = ServeSettings(repository=REPOSITORY, engine={"model": "é", "max_num_seqs": 4})
    assert json.loads(settings.engine_json()) == {"model": "é", "max_num_seqs": 4}


def test_the_reason_of_a_failed_load_is_found() -> None:
    line = (
        "E1130 15:39:48.172157 14853 model_lifecycle.cc:642] "
        "\"failed to load 'llm' version 1: Internal: ValueError: no 'x'\\n\\nAt:\\n  a.py(2)\"\n"
    )
    assert load_error_in(line) == "llm: ValueError: no 'x'\n\nAt:\n  a.py(2)"
    assert load_error_in("I1130 1 server.cc:604] \"failed to load 'llm'\"\n") is None


def test_only_ones_own_shared_memory_is_removed(tmp_path: Path) -> None:
    for name in ("chairlift-1-a-0", "chairlift-1-a-1", "chairlift-2-b-0"):
        (tmp_path / name).touch()
    remove_shared_memory("chairlift-1-a-", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["chairlift-2-b-0"]
