"""The commands of `chairlift` against a server with the default model."""

import subprocess
import sys

import pytest

from tests.server.harness import ServerProcess

QUESTION = "What is the capital of France?"


def chairlift(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chairlift_client", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_serve_streams_a_first_answer_and_prints_examples(server: ServerProcess) -> None:
    log = server.log()
    assert f"> {QUESTION}\n" in log
    assert "Paris" in log.split(QUESTION)[1]
    assert f"curl -N {server.http}/v2/models/llm/generate_stream" in log


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("by", ["argument", "stdin"])
def test_chat_answers_over_both_protocols(server: ServerProcess, protocol: str, by: str) -> None:
    url = getattr(server, protocol)
    question = [QUESTION] if by == "argument" else []
    options = ("--url", url, "--max-tokens", "24", "--temperature", "0")
    done = chairlift("chat", *question, *options, stdin=QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_generate_continues_a_text_the_same_over_both_protocols(server: ServerProcess) -> None:
    options = ("--max-tokens", "12", "--temperature", "0", "--set", "ignore_eos=true")
    texts = [
        chairlift("generate", "The sun is", "--url", url, *options)
        for url in (server.grpc, server.http)
    ]
    assert [t.returncode for t in texts] == [0, 0], texts
    assert texts[0].stdout == texts[1].stdout and len(texts[0].stdout) > 12


def test_refusals_are_one_line_and_exit_code_1(server: ServerProcess) -> None:
    for url in (server.grpc, server.http):
        done = chairlift("generate", "x", "--url", url, "--set", "top_p=7.5")
        assert done.returncode == 1
        assert done.stderr.startswith("error:") and "top_p" in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", ["startup", "readiness", "liveness"])
def test_probes_pass(server: ServerProcess, kind: str) -> None:
    done = chairlift("probe", kind, "--url", server.http)
    assert done.returncode == 0, done.stderr
