"""Steps before the first request: they measure what a step needs, and nobody meets a cold start.

A step here goes through the runner like any other, for made-up requests over the pool's first
blocks; what it writes there is registered nowhere and is overwritten by whoever gets the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from .model_runner import Runner
from .request import Request, SamplingParams
from .scheduler import Row, StepPlan

# Decodes alone, with a prompt, and in numbers: the shapes that a fresh server meets first.
FIRST_SHAPES = ((1, 0), (1, 8), (8, 0))


def make_plan(num_decodes: int, num_prompt_tokens: int, block_size: int) -> StepPlan:
    """``num_decodes`` rows with two tokens of context, and one prompt of ``num_prompt_tokens``."""
    plan = StepPlan(num_tokens=num_decodes + num_prompt_tokens)
    block = 1
    for uid in range(num_decodes):
        request = _request(uid, [0, 0], [block])
        plan.decodes.append(Row(request, 1, 1))
        block += 1
    if num_prompt_tokens:
        count = -(-num_prompt_tokens // block_size)
        request = _request(num_decodes, [0] * num_prompt_tokens, [*range(block, block + count)])
        plan.prefills.append(Row(request, 0, num_prompt_tokens))
    return plan


def blocks_needed(num_decodes: int, num_prompt_tokens: int, block_size: int) -> int:
    """Blocks that the plan of these sizes uses, the null block included."""
    return 1 + num_decodes + -(-num_prompt_tokens // block_size)


def run_steps(runner: Runner, shapes: Iterable[tuple[int, int]], block_size: int) -> None:
    """Run a step of each (decodes, prompt tokens), then forget its requests."""
    for num_decodes, num_prompt_tokens in shapes:
        plan = make_plan(num_decodes, num_prompt_tokens, block_size)
        runner.run(plan)
        for row in plan.rows:
            runner.release(row.request)


def _request(uid: int, prompt_ids: list[int], block_ids: list[int]) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    request = Request(-1 - uid, prompt_ids, params, seed=0, arrival=0.0)
    request.block_ids = block_ids
    return request
