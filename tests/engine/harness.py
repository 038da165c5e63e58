"""Runs an engine's loop in the test's own thread: deterministic, one step at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from chairlift.assembly import build
from chairlift.config import EngineConfig
from chairlift.graphs import Capture
from chairlift.loader import LoadedModel
from chairlift.request import Request, SamplingParams
from chairlift.step_outputs import ErrorOut, Outputs, PromptOut, TokenOut

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


@dataclass
class Answer:
    """All that came out for one request: token ids by sample index, the error, the finish words."""

    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    prompt_logprobs: list[Any] = field(default_factory=list)
    error: str | None = None
    num_cached: int = 0


class Harness:
    """An engine without its thread; ``step`` drives it, ``check`` proves its books."""

    def __init__(
        self, loaded: LoadedModel | None = None, capture: Capture | None = None, **settings: Any
    ) -> None:
        self.now = 0.0
        self.answers: dict[int, Answer] = defaultdict(Answer)
        self.stats: list[Any] = []
        self._uids = count(0, 64)
        # Pools are given in blocks, few enough to run out of them: 16 tokens each by default.
        self.config = EngineConfig.model_validate({"block_size": 16} | settings)
        self.assembly = build(
            self.config,
            self._take,
            lambda: self.now,
            loaded=loaded,
            on_step=self.stats.append,
            capture=capture,
        )
        self.engine = self.assembly.engine
        self.scheduler = self.assembly.scheduler

    def _take(self, outputs: Outputs) -> None:
        for out in outputs:
            answer = self.answers[out.group]
            if isinstance(out, TokenOut):
                answer.tokens[out.sample_index].append(out.token_id)
                answer.logprobs[out.sample_index].append(out.logprobs)
                if out.finish is not None:
                    assert out.sample_index not in answer.finish, "finished twice"
                    answer.finish[out.sample_index] = out.finish.value
            elif isinstance(out, PromptOut):
                answer.num_cached = out.num_cached
                answer.prompt_logprobs += out.logprobs
            elif isinstance(out, ErrorOut):
                assert answer.error is None, "two errors for one request"
                answer.error = out.message

    def submit(self, prompt_ids: list[int], params: SamplingParams = GREEDY, **fields: Any) -> int:
        uid = next(self._uids)
        fields.setdefault("eos_ids", self.assembly.loaded.eos_ids)
        fields.setdefault("seed", params.seed or 0)
        request = Request(uid, list(prompt_ids), params, arrival=self.now, **fields)
        self.engine.check_fits(request)
        self.engine.submit([request])
        return uid

    def step(self) -> bool:
        self.now += 0.01
        self.engine._take_commands()
        progressed = self.engine._step()
        self.check()
        return progressed

    def check(self) -> None:
        everyone = self.scheduler.running + list(self.scheduler.waiting)
        self.scheduler.kv.check_integrity(everyone)

    def run(self, each_step: Callable[[], None] = lambda: None, limit: int = 20_000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            progressed = self.step()
            each_step()
            if not progressed and not self.scheduler.num_unfinished:
                self.check_all_returned()
                return
        raise AssertionError(f"requests left after {limit} steps")

    def check_all_returned(self) -> None:
        assert self.scheduler.kv.num_used == 0, "blocks are still held"
        assert not self.engine._collector.groups

    def generate(
        self, prompts: Iterable[list[int]], params: SamplingParams = GREEDY, **fields: Any
    ) -> list[list[int]]:
        uids = [self.submit(prompt, params, **fields) for prompt in prompts]
        self.run()
        return [self.answers[uid].tokens[0] for uid in uids]


class Oracle:
    """transformers' own greedy ``generate``, and how close its top two logits were."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def generate(self, prompt_ids: list[int], max_tokens: int, **options: Any) -> list[int]:
        ids = torch.tensor([prompt_ids])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            **options,
        )
        return out[0, len(prompt_ids) :].tolist()

    @torch.inference_mode()
    def top_two_gap(self, token_ids: list[int]) -> float:
        logits = self.model(torch.tensor([token_ids])).logits[0, -1].float()
        best = logits.topk(2).values
        return float(best[0] - best[1])

    def check(
        self, prompt_ids: list[int], tokens: list[int], max_tokens: int, tie: float = 1e-3
    ) -> None:
        """Equal to ``generate``; a tie excuses a difference, and what follows it."""
        self.check_against(prompt_ids, tokens, self.generate(prompt_ids, max_tokens), tie)

    def check_against(
        self, prompt_ids: list[int], tokens: list[int], expected: list[int], tie: float = 1e-3
    ) -> None:
        if tokens == expected:
            return
        first = next(
            (i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b),
            min(len(tokens), len(expected)),
        )
        gap = self.top_two_gap(prompt_ids + expected[:first])
        assert gap < tie, (
            f"token {first} of {len(expected)}: {tokens[first : first + 3]} instead of "
            f"{expected[first : first + 3]}; the reference's top two are {gap} apart"
        )
