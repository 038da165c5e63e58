"""transformers' own continuous batching, with its settings as it infers them on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

NO_END_TOKEN = -1
RESULT_SECONDS = 600.0


class TransformersCB:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        model = AutoModelForCausalLM.from_pretrained(
            settings.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        options = {"max_batch_tokens": 512, "num_blocks": 256, **settings.options}
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_END_TOKEN),
            continuous_batching_config=ContinuousBatchingConfig(**options),
        )
        self._manager.start()
        self._num_runs = 0

    def versions(self) -> dict[str, str]:
        return package_versions("transformers", "torch")

    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        self._num_runs += 1
        answers: dict[str, Answer] = {}
        for number, request in enumerate(requests):
            request_id = f"{self._num_runs}-{number}"
            answers[request_id] = Answer()
            self._manager.add_request(
                request.prompt_ids,
                request_id,
                max_new_tokens=request.max_tokens,
                eos_token_id=NO_END_TOKEN,
                streaming=True,
            )
        missing = sum(request.max_tokens for request in requests)
        while missing > 0:
            result = self._manager.get_result(timeout=RESULT_SECONDS)
            if result is None:
                raise TimeoutError(f"no result in {RESULT_SECONDS} s, {missing} tokens are missing")
            if result.error:
                raise RuntimeError(result.error)
            answer = answers[result.request_id]
            new = result.generated_tokens[len(answer.token_ids) :]
            if new:
                answer.add(clock(), new)
                missing -= len(new)
        return list(answers.values())


def make(settings: Settings) -> PeerEngine:
    return TransformersCB(settings)


if __name__ == "__main__":
    serve(make)
