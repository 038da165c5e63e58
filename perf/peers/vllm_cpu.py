"""vLLM for CPUs, in process: its LLMEngine, stepped here, without detokenizing.

block_size 32 (16 is refused on CPUs) and 512 tokens a step: with its own default it took 12.6 s for
workload A where these took 9.8 s, on the machine on which they were chosen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind


class Vllm:
    def __init__(self, settings: Settings) -> None:
        # Left to itself it may keep a core free for processes that do not exist here.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings.threads - 1}"
        self._llm = LLM(
            model=str(settings.model),
            dtype="bfloat16",
            **{"block_size": 32, "max_num_batched_tokens": 512, **settings.options},
        )
        self._engine = self._llm.llm_engine
        self._num_runs = 0

    def versions(self) -> dict[str, str]:
        return package_versions("vllm-cpu", "torch", "transformers")

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        self._num_runs += 1
        answers: dict[str, Answer] = {}
        for number, request in enumerate(requests):
            request_id = f"{self._num_runs}-{number}"
            answers[request_id] = Answer()
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = TokensPrompt(prompt_token_ids=request.prompt_ids)
            self._engine.add_request(request_id, prompt, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = clock()
            for output in outputs:
                token_ids = list(output.outputs[0].token_ids)
                if token_ids:
                    answers[output.request_id].add(now, token_ids)
        return list(answers.values())


def make(settings: Settings) -> PeerEngine:
    return Vllm(settings)


if __name__ == "__main__":
    serve(make)
