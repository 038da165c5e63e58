"""A step past transformers' own `forward`, for models of which nothing is left but fused parts.

That function spends half a millisecond of Python per step on what a step does not need: masks,
output classes, and angles worked out anew. Whether it does anything else is told by trial: without
it the logits must be the same to the last bit, at the first positions and at the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attention import AttentionBackend, StepBatch
from .forward import Forward, through_model
from .fused_modules import CantFuse, FusedNorm
from .fused_stack import FusedStack
from .linears import LogitsHead
from .self_check import LENGTHS, Subject, paged_logits

logger = logging.getLogger(__name__)


class DirectForward:
    """Embedding, stack, norm, and head; the angles of every position come from a table.

    Raises ``CantFuse`` where the model has other parts than these.
    """

    def __init__(self, model: Any, max_model_len: int) -> None:
        decoder = model.get_decoder()
        norm, head = getattr(decoder, "norm", None), model.get_output_embeddings()
        if not isinstance(norm, FusedNorm) or not isinstance(head, LogitsHead):
            raise CantFuse("its norm or its head is not fused")
        if len(decoder.layers) != 1 or not isinstance(decoder.layers[0], FusedStack):
            raise CantFuse("its layers are not one stack")
        self._embed = model.get_input_embeddings()
        if type(self._embed) is nn.Embedding:  # nothing else: 8 us instead of 65
            self._embed = partial(torch.index_select, self._embed.weight, 0)
        self._stack, self._norm, self._head = decoder.layers[0], norm, head
        like = self._embed(torch.zeros(1, dtype=torch.int64))[None]
        cos, sin = decoder.rotary_emb(like, torch.arange(max_model_len)[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    def __call__(self, batch: StepBatch) -> Tensor:
        hidden: Tensor = self._embed(batch.input_ids)
        cos = self._cos.index_select(0, batch.positions)
        sin = self._sin.index_select(0, batch.positions)
        self._stack.run(hidden, cos, sin, batch)
        if len(batch.logit_rows) < len(hidden):
            hidden = hidden.index_select(0, batch.logit_rows)
        return self._head.rows(self._norm.rows(hidden))


def shortest_forward(
    subject: Subject, make_backend: Callable[[], AttentionBackend], max_model_len: int
) -> Forward:
    """``DirectForward`` where it gives what the model gives, else the model."""
    whole = through_model(subject.model)
    try:
        direct = DirectForward(subject.model, max_model_len)
        for first_position in (0, max(0, max_model_len - max(LENGTHS))):
            wanted = paged_logits(subject, make_backend(), whole, first_position)
            got = paged_logits(subject, make_backend(), direct, first_position)
            if not all(map(torch.equal, wanted, got)):
                raise CantFuse("it does more than its parts")
    except Exception as reason:
        logger.info("%s is called as a whole: %s", type(subject.model).__name__, reason)
        return whole
    return direct
