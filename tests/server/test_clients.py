"""Clients that we did not write, each in an environment of its own, against a real server."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.server.client_env import client_python
from tests.server.harness import ServerProcess
from tests.server.talk import generate, wait_drained

STORY = "Once upon a time"

LITELLM = """
import json, sys, litellm
base, question = sys.argv[1], [{"role": "user", "content": sys.argv[2]}]
def ask(path, **more):
    return litellm.completion(
        model="triton/llm", api_base=base + path, messages=question, max_tokens=6, **more
    )
print(json.dumps([
    ask("llm/generate").choices[0].message.content,
    "".join(c.choices[0].delta.content or "" for c in ask("llm/generate", stream=True)),
    ask("llm_infer/infer").choices[0].message.content,
]))
"""

LLAMA_INDEX = """
import json, sys
from llama_index.llms.nvidia_triton import NvidiaTriton
# It counts the pieces itself, and may drop the last one of as many as it asked for.
llm = NvidiaTriton(server_url=sys.argv[1], model_name="llm", tokens=7)
*_, last = llm.stream_complete(sys.argv[2])
print(json.dumps([llm.complete(sys.argv[2]).text, last.text]))
"""


def run(client: str, program: str, *arguments: str) -> list[str]:
    """What the program prints last, read as JSON."""
    command = [str(client_python(client)), "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def answer(server: ServerProcess) -> str:
    return generate(server, text_input=STORY, max_tokens=6, temperature=0.0).text


@pytest.mark.slow
def test_litellm_generate_stream_and_infer(server: ServerProcess, answer: str) -> None:
    texts = run("litellm", LITELLM, f"{server.http}/v2/models/", STORY)
    assert texts == [answer] * 3


@pytest.mark.slow
def test_llama_index_complete_and_stream_complete(server: ServerProcess, answer: str) -> None:
    texts = run("llama-index", LLAMA_INDEX, f"127.0.0.1:{server.grpc_port}", STORY)
    longer = generate(server, text_input=STORY, max_tokens=7, temperature=0.0).text
    assert set(texts) <= {answer, longer}
    wait_drained(server)
