"""Clients that we did not write, each in an environment of its own, against a real server."""

from __future__ import annotations

import json
import subprocess

import pytest
import tritonclient.grpc as grpcclient

from tests.server.client_env import client_python
from tests.server.grpc_talk import stream_infer, tensors, texts
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

# Ends long before as many pieces as are asked for, so that none is dropped.
LLAMA_INDEX_TO_THE_END = """
import json, sys
from llama_index.llms.nvidia_triton import NvidiaTriton
llm = NvidiaTriton(server_url=sys.argv[1], model_name="llm", tokens=60)
pieces = list(llm.stream_complete(sys.argv[2]))
joined = "".join(piece.delta for piece in pieces)
print(json.dumps([llm.complete(sys.argv[2]).text, joined, pieces[-1].text]))
"""
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


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
    found = run("litellm", LITELLM, f"{server.http}/v2/models/", STORY)
    assert found == [answer] * 3


@pytest.mark.slow
def test_llama_index_complete_and_stream_complete(server: ServerProcess, answer: str) -> None:
    found = run("llama-index", LLAMA_INDEX, f"127.0.0.1:{server.grpc_port}", STORY)
    longer = generate(server, text_input=STORY, max_tokens=7, temperature=0.0).text
    assert set(found) <= {answer, longer}
    wait_drained(server)


@pytest.mark.slow
def test_llama_index_has_the_text_that_tritonclient_has(server: ServerProcess) -> None:
    address = f"127.0.0.1:{server.grpc_port}"
    asked = {"text_input": QUESTION, "max_tokens": 60, "temperature": 0.0, "stream": True}
    pieces = texts(stream_infer(server, "llm", tensors(grpcclient, batched=True, **asked)))
    assert 1 < len(pieces) < 60
    found = run("llama-index", LLAMA_INDEX_TO_THE_END, address, QUESTION)
    assert found == ["".join(pieces)] * 3
    wait_drained(server)
