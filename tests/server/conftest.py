"""Real tritonservers for the tests, started through `chairlift serve`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.server.harness import ROOT, TOY_REPOSITORY, ServerProcess, running_server

StartServer = Callable[..., ServerProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever lies in this folder needs a server."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server with the default model for all tests that leave it as they found it."""
    with running_server(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The default model's tokenizer, as Hugging Face reads it."""
    return AutoTokenizer.from_pretrained(ROOT / "models" / "SmolLM2-135M-Instruct")


@pytest.fixture
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start a server of one's own: start_server("--set", "max_num_seqs=4"); stopped at the end."""
    with ExitStack() as stack:

        def start(*arguments: str, **options: object) -> ServerProcess:
            folder = tmp_path_factory.mktemp("server")
            return stack.enter_context(running_server(folder, *arguments, **options))  # type: ignore[arg-type]

        yield start


@pytest.fixture
def start_toy(start_server: StartServer) -> StartServer:
    """Start a server whose model only counts words, for tests of the supervisor."""

    def start(*arguments: str, **options: object) -> ServerProcess:
        return start_server(
            *("--model-repository", str(TOY_REPOSITORY), "--model", "toy", "--no-greet"),
            *arguments,
            **options,
        )

    return start
