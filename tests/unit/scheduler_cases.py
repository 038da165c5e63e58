"""What the scheduler's cases share: a small engine, prompts, and a way to look at a step."""

from __future__ import annotations

import random
from typing import Any

from chairlift.scheduler import StepPlan
from tests.unit.simulation import Simulation


def engine(num_blocks: int = 100, block_size: int = 4, **settings: Any) -> Simulation:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings}
    return Simulation(num_blocks, block_size, settings)


def shape(plan: StepPlan) -> tuple[int, list[int]]:
    """How many decodes, and the lengths of the prompt chunks."""
    return len(plan.decodes), [row.num_tokens for row in plan.prefills]


def unlike(length: int, seed: int) -> list[int]:
    """A prompt that shares no block with one of another seed."""
    return [seed, *random.Random(seed).choices(range(100_000), k=length - 1)]
