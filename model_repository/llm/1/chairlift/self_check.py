"""Two requests through the paged cache, compared with transformers' own attention, at each load.

What a model does besides calling the attention interface (masks of its own, positions counted from
a cache of its own, state kept elsewhere) can't be read off its class; it shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import INTERFACE_NAME, AttentionBackend, LayerShape, StepBatch
from .forward import Forward

# Token counts of two prompts, and how many of each the first of two steps computes: the second has
# a decode, a chunk, and keys of the first in blocks that are out of order.
LENGTHS = (25, 18)
FIRST = (24, 7)
TABLES = ((5, 2), (1, 3))
BLOCK_SIZE, NUM_BLOCKS = 16, 6
# Error over signal of the median token. SmolLM2: 0.045 in bf16, 0.006 in fp16, below 1e-5 in fp32;
# with a scale that is 5 % off 0.055 in fp32, with a wrong window or without positions above 0.4.
TOLERANCE = {torch.float32: 0.02, torch.float16: 0.25, torch.bfloat16: 0.25}


class Subject(NamedTuple):
    """A model, what its layers keep, and what it computes in."""

    model: Any
    layers: Sequence[LayerShape]
    vocab_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def prompts(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(11)
        return [torch.randint(self.vocab_size, (n,), generator=generator) for n in LENGTHS]


def own_logits(subject: Subject) -> list[Tensor]:
    """Logits [tokens, V] of each step's tokens by transformers' plain attention, uncached."""
    model = subject.model
    model.set_attn_implementation("eager")
    try:
        whole = [
            model(input_ids=ids[None].to(subject.device), use_cache=False).logits[0]
            for ids in subject.prompts
        ]
    finally:
        model.set_attn_implementation(INTERFACE_NAME)
    first = [logits[:count] for logits, count in zip(whole, FIRST, strict=True)]
    second = [logits[count:] for logits, count in zip(whole, FIRST, strict=True)]
    return [torch.cat(first), torch.cat(second)]


def paged_logits(
    subject: Subject, backend: AttentionBackend, forward: Forward, first_position: int = 0
) -> list[Tensor]:
    """The same by our attention, in two steps over both prompts, which begin at a position."""
    backend.allocate(subject.layers, NUM_BLOCKS, BLOCK_SIZE, subject.dtype, subject.device)
    parts = (((0,) * len(FIRST), FIRST), (FIRST, LENGTHS))
    batches = [_batch(subject, backend, starts, ends) for starts, ends in parts]
    return [
        forward(batch._replace(positions=batch.positions + first_position)) for batch in batches
    ]


def difference(wanted: list[Tensor], got: list[Tensor]) -> float:
    """The worse step's error over signal, of its median token that is finite at all.

    Single tokens don't count: where rounding makes a router choose another expert they differ.
    """
    worst = 0.0
    for one, other in zip(wanted, got, strict=True):
        finite = one.isfinite().all(-1)
        if not finite.any():
            continue
        one, other = one[finite].float(), other[finite].float()
        signal = (one - one.mean(-1, keepdim=True)).pow(2).mean(-1).sqrt()
        error = (one - other).pow(2).mean(-1).sqrt() / signal.clamp(min=1e-20)
        worst = max(worst, float(error.nan_to_num(float("inf")).median()))
    return worst


def _batch(
    subject: Subject, backend: AttentionBackend, starts: Sequence[int], ends: Sequence[int]
) -> StepBatch:
    device = subject.device
    positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    counts = [len(row) for row in positions]
    tables = torch.tensor(TABLES)
    slots = [
        table[row // BLOCK_SIZE] * BLOCK_SIZE + row % BLOCK_SIZE
        for table, row in zip(tables, positions, strict=True)
    ]
    token_ids = [ids[row] for ids, row in zip(subject.prompts, positions, strict=True)]
    num_tokens = sum(counts)
    return StepBatch(
        input_ids=torch.cat(token_ids).to(device),
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        block_tables=tables.int().to(device),
        query_start=torch.tensor([0, counts[0], num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
        logit_rows=torch.arange(num_tokens, device=device),
        num_decodes=int(counts[0] == 1),
        max_query_len=max(counts),
        max_seq_len=max(ends),
        backend=backend,
    )
