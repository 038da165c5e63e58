"""Chairlift as a user meets it: a real tritonserver, answers streamed over gRPC to this process.

The processor time of this process is the load client's, spent on the same cores as the server.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve

from chairlift_client.load import LoadClient, LoadRequest, closed_loop
from chairlift_client.trial import trial_server


class ChairliftServer:
    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._pieces: defaultdict[str, list[bytes]] = defaultdict(list)
        options = dict(settings.options)
        num_streams = int(options.pop("client_streams", 1))
        batching = str(options.pop("batching", "continuous"))
        server = stack.enter_context(
            trial_server(
                {"threads": settings.threads, **options},
                batching=batching,
                model=str(settings.model),
            )
        )
        self._client = stack.enter_context(
            LoadClient(
                server.grpc,
                "llm",
                time.perf_counter,
                num_streams=num_streams,
                extra_inputs={"temperature": 0.0},
                on_response=self._read,
            )
        )

    def versions(self) -> dict[str, str]:
        return package_versions("chairlift", "torch", "transformers", "nvidia-pytriton")

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        start = time.perf_counter() - clock()
        load = [
            LoadRequest(
                {"input_ids": request.prompt_ids, "max_tokens": request.max_tokens},
                {"ignore_eos": True},
            )
            for request in requests
        ]
        self._pieces.clear()
        traces = closed_loop(self._client, load, len(load))
        answers = []
        for trace in traces:
            if trace.error is not None:
                raise RuntimeError(trace.error)
            times = [arrival.time - start for arrival in trace.arrivals]
            counts = [arrival.tokens for arrival in trace.arrivals]
            text = b"".join(self._pieces[trace.request_id]).decode(errors="replace")
            answers.append(Answer(times, counts, text=text))
        return answers

    def _read(self, request_id: str, response: Any) -> None:
        """Read the text, as any client would; a BYTES element is its length and its bytes."""
        for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.name == "text_output":
                self._pieces[request_id].append(content[4:])


if __name__ == "__main__":
    with ExitStack() as exit_stack:

        def make(settings: Settings) -> PeerEngine:
            return ChairliftServer(settings, exit_stack)

        serve(make)
