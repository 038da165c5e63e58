"""transformers' generate over left-padded batches of a fixed size: what most people do at first.

A batch runs until its longest answer is done; a request's surplus tokens are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from driver import Answer, Clock, PeerEngine, Request, Settings, package_versions, serve
from transformers import AutoModelForCausalLM, StoppingCriteria


class NoteTokens(StoppingCriteria):
    """Called after each step: notes the new tokens, and stops nobody."""

    def __init__(
        self, requests: Sequence[Request], answers: Sequence[Answer], clock: Clock
    ) -> None:
        self._requests = requests
        self._answers = answers
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        now = self._clock()
        newest = input_ids[:, -1].tolist()
        for request, answer, token in zip(self._requests, self._answers, newest, strict=True):
            if len(answer.token_ids) < request.max_tokens:
                answer.add(now, [token])
        return torch.zeros(len(newest), dtype=torch.bool)


class StaticBatches:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._batch_size = settings.options["batch_size"]
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.bfloat16)
        self._model.eval()

    def versions(self) -> dict[str, str]:
        return package_versions("transformers", "torch")

    @torch.inference_mode()
    def run(self, requests: Sequence[Request], clock: Clock) -> list[Answer]:
        answers = [Answer() for _ in requests]
        for first in range(0, len(requests), self._batch_size):
            batch = slice(first, first + self._batch_size)
            self._run_batch(requests[batch], answers[batch], clock)
        return answers

    def _run_batch(
        self, requests: Sequence[Request], answers: Sequence[Answer], clock: Clock
    ) -> None:
        width = max(len(request.prompt_ids) for request in requests)
        longest = max(request.max_tokens for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        rows = zip(requests, padding, strict=True)
        ids = torch.tensor([[0] * pad + request.prompt_ids for request, pad in rows])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding])
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            min_new_tokens=longest,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[NoteTokens(requests, answers, clock)],
        )


def make(settings: Settings) -> PeerEngine:
    return StaticBatches(settings)


if __name__ == "__main__":
    serve(make)
