"""From a step's tensors to logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .attention import StepBatch

# Logits [S, V] of the tokens ``logit_rows`` of a step.
Forward = Callable[[StepBatch], Tensor]


def through_model(model: Any) -> Forward:
    """Through transformers' ``model``, for which all rows are one sequence."""

    def forward(batch: StepBatch) -> Tensor:
        output = model(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            batch=batch,
        )
        logits: Tensor = output.logits[0]
        return logits

    return forward
