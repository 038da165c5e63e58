"""llama.cpp's server, asked over HTTP by one thread per request; runs in any Python.

16 slots with a KV cache of their own each, and flash attention: more slots or one shared cache were
slower for workload A on the machine on which they were chosen.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from driver import Answer, Clock, PeerEngine, Request, Settings, serve

START_SECONDS = 300.0
POLL_SECONDS = 0.2
ANSWER_SECONDS = 1200.0
SLOT_TOKENS = 2048


class LlamaServer:
    def __init__(self, settings: Settings) -> None:
        self._program = settings.options["program"]
        slots = int(settings.options.get("slots", 16))
        self._port = _free_port()
        self._process = subprocess.Popen(
            [
                self._program,
                *("-m", settings.options["gguf"]),
                *("--host", "127.0.0.1", "--port", str(self._port)),
                *("-t", str(settings.threads), "-tb", str(settings.threads)),
                *("-np", str(slots), "-c", str(slots * SLOT_TOKENS)),
                *("--no-kv-unified", "-fa", "on", "--no-webui"),
            ]
        )
        atexit.register(self._stop)
        self._wait_until_ready()

    def versions(self) -> dict[str, str]:
        shown = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        return {"llama.cpp": (shown.stderr + shown.stdout).splitlines()[0]}

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self._ask(request, clock), requests))

    def _ask(self, request: Request, clock: Clock) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        body = {
            "prompt": request.prompt_ids,
            "n_predict": request.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
        }
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {response.read()[:500]!r}")
        answer = Answer()
        for line in response:
            if line.startswith(b"data: "):
                tokens = json.loads(line[6:]).get("tokens", [])
                if tokens:
                    answer.add(clock(), tokens)
        connection.close()
        return answer

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama-server did not start; its log says why")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make(settings: Settings) -> PeerEngine:
    return LlamaServer(settings)


if __name__ == "__main__":
    serve(make)
