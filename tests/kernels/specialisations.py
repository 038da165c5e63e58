"""Launches that serving makes and warm-up did not: each would be a compilation inside a request.

Run outside the interpreter; prints the names of such kernels as a JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from chairlift_kernels import logprobs, penalties, sampling
from chairlift_kernels.ops import TritonOps
from perf.recorded_launches import Launch, recording

HEADS, KV_HEADS, SIZE, VOCABULARY = 8, 2, 64, 5000


def step(ops: TritonOps, queries: tuple[int, ...], max_seq_len: int, table_width: int) -> None:
    """One layer and the sampling of one batch, all index tensors as slices of larger buffers."""
    tokens, rows = sum(queries), len(queries)
    cache = ops.allocate_cache([(KV_HEADS, SIZE, SIZE)], 4, 16)
    hidden = torch.empty(tokens, HEADS * SIZE, dtype=torch.bfloat16)
    ops.rms_norm(hidden, hidden[0], 1e-6, residual=torch.empty_like(hidden))
    qkv = torch.empty(tokens, (HEADS + 2 * KV_HEADS) * SIZE, dtype=torch.bfloat16)
    angles = torch.empty(tokens, SIZE, dtype=torch.bfloat16)
    slots = torch.zeros(tokens, dtype=torch.int64)
    q = ops.rope_and_cache(qkv, angles, angles, cache, 0, slots, num_heads=HEADS)
    ops.attend(
        q, cache, 0, torch.zeros(rows, table_width, dtype=torch.int32),
        torch.zeros(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int32),
        num_decodes=queries.count(1), max_query_len=max(queries), max_seq_len=max_seq_len,
        scale=0.125,
    )  # fmt: skip
    ops.gated_activation(torch.empty(tokens, 2048, dtype=torch.bfloat16), "silu")
    logits, real = torch.empty(rows, VOCABULARY), torch.empty(rows)
    whole = torch.zeros(rows, dtype=torch.int64)
    sampling.sample(logits, real, whole.int(), real, real, whole, whole, whole)
    counts = torch.zeros(4, VOCABULARY, dtype=torch.int32)
    penalties.apply_penalties(logits, counts.byte(), counts, whole, real, real, real)
    logprobs.logprobs(logits, whole, min(rows, 20))


def recorded(batches: Iterable[tuple[tuple[int, ...], int, int]]) -> list[Launch]:
    with recording() as launches:
        for batch in batches:
            step(TritonOps("cpu", capability=(9, 0)), *batch)
    return launches


def unforeseen() -> list[str]:
    """Kernels launched in sizes of serving with a specialisation that warm-up had not asked for."""
    warm = recorded([((1, 5), 512, 32), ((1, 5), 4096, 256)])
    rows = [((1,) * n, length, 16) for n in (1, 2, 3, 15, 16, 17, 64, 200) for length in (1, 9000)]
    prompts = [((n,), n, max(1, n // 16)) for n in (2, 15, 16, 17, 100, 1000)]
    served = recorded([*rows, *prompts, ((1,) * 7 + (16, 33), 129, 9)])
    return sorted({launch.name for launch in set(served) - set(warm)})


if __name__ == "__main__":
    print(json.dumps(unforeseen()))
