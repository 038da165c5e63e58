"""Steps before the first request: they measure what a step needs, and nobody meets a cold start.

A step here goes through the runner like any other, for made-up requests over the pool's first
blocks; what it writes there is registered nowhere and is overwritten by whoever gets the blocks.
Triton-lang kernels are compiled at their first launch, once for each specialisation: the steps ask
for every one that requests can ask for later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .attention import AttentionBackend
from .attention_kernels import TritonAttention
from .kv_cache import NULL_BLOCK, BlockCopy
from .model_runner import Runner
from .request import Request, SamplingParams
from .scheduler import Row, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
# All that sampling has kernels for.
SAMPLED = SamplingParams(
    temperature=1.0, top_k=2, top_p=0.9, repetition_penalty=1.1, logprobs=1, max_tokens=1
)


class WarmStep(NamedTuple):
    """Rows with one token of ``context`` tokens each, one prompt, and a copy of the null block."""

    num_decodes: int
    num_prompt_tokens: int
    context: int = 2
    copies: bool = False
    params: SamplingParams = GREEDY

    def blocks_needed(self, block_size: int) -> int:
        """The null block included; a decode row has one block, as often as its table is long."""
        return 1 + self.num_decodes + -(-self.num_prompt_tokens // block_size)

    def plan(self, block_size: int) -> StepPlan:
        plan = StepPlan(num_tokens=self.num_decodes + self.num_prompt_tokens)
        if self.copies:
            plan.copies.append(BlockCopy(NULL_BLOCK, NULL_BLOCK))
        block = 1
        for uid in range(self.num_decodes):
            table = [block] * -(-self.context // block_size)
            request = _request(uid, [0] * self.context, table, self.params)
            plan.decodes.append(Row(request, self.context - 1, 1))
            block += 1
        if self.num_prompt_tokens:
            table = [*range(block, self.blocks_needed(block_size))]
            prompt = [0] * self.num_prompt_tokens
            request = _request(self.num_decodes, prompt, table, self.params)
            plan.prefills.append(Row(request, 0, self.num_prompt_tokens))
        return plan


# Decodes alone, with a prompt, and in numbers: the shapes that a fresh server meets first.
FIRST_STEPS = (WarmStep(1, 0), WarmStep(1, 8), WarmStep(8, 0))


def steps_for(backend: AttentionBackend, max_model_len: int) -> list[WarmStep]:
    """The first steps, and what else the backend's kernels are compiled for."""
    steps = list(FIRST_STEPS)
    if isinstance(backend, TritonAttention):
        lengths = backend.decode_lengths(max_model_len)
        steps += [WarmStep(1, 0, length, copies=True, params=SAMPLED) for length in lengths]
        # A query's stride differs where there is only one, and with it the kernel for odd sizes.
        steps += [WarmStep(2, 0, length) for length in lengths]
    return steps


def run_steps(
    runner: Runner, steps: Iterable[WarmStep], block_size: int, num_blocks: int | None = None
) -> None:
    """Run those that ``num_blocks`` suffice for, and forget their requests."""
    for step in steps:
        if num_blocks is not None and step.blocks_needed(block_size) > num_blocks:
            continue
        plan = step.plan(block_size)
        runner.run(plan)
        for row in plan.rows:
            runner.release(row.request)


def _request(
    uid: int, prompt_ids: list[int], block_ids: list[int], params: SamplingParams
) -> Request:
    request = Request(-1 - uid, prompt_ids, params, seed=0, arrival=0.0)
    request.block_ids = block_ids
    return request
