"""A cache beyond 2^31 elements: the highest blocks are written, copied and attended to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from chairlift_kernels import reference
from chairlift_kernels.kv_cache import KvCache
from chairlift_kernels.ops import TritonOps
from perf.gpu.timing import Bench, Table

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 32, 8, 4, 128


class Filled(NamedTuple):
    """One request in the highest blocks: its queries, keys and values [keys, heads, D]."""

    cache: KvCache
    blocks: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def fill(bench: Bench, ops: TritonOps) -> Filled:
    """2.7e9 elements for K and as many for V."""
    elements, total = bench.pick(2**31 + 2**29, 2**20), bench.pick(700, 40)
    dtype = torch.float16 if bench.smoke else torch.bfloat16
    num_blocks = elements // (BLOCK_SIZE * KV_HEADS * SIZE)
    cache = ops.allocate_cache([(KV_HEADS, SIZE, SIZE)], num_blocks, BLOCK_SIZE, dtype)
    blocks = num_blocks - 1 - torch.randperm(-(-total // BLOCK_SIZE), device=bench.device)
    places = torch.arange(total, device=bench.device)
    slots = blocks[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    qkv = torch.randn(total, (HEADS + 2 * KV_HEADS) * SIZE, device=bench.device).to(dtype)
    cos, sin = torch.ones_like(qkv[:, :SIZE]), torch.zeros_like(qkv[:, :SIZE])
    queries = ops.rope_and_cache(qkv, cos, sin, cache, 0, slots, num_heads=HEADS)
    parts = qkv.view(total, -1, SIZE).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    return Filled(cache, blocks, queries, *parts[1:])


def attention_error(ops: TritonOps, filled: Filled, queries: int) -> float:
    """Largest difference from float64 for the last `queries` tokens."""
    total = filled.keys.shape[0]
    q = filled.queries[-queries:]
    starts = torch.tensor([0, queries], dtype=torch.int32, device=q.device)
    lengths = torch.tensor([total], dtype=torch.int32, device=q.device)
    tables = filled.blocks.int()[None]
    out = ops.attend(
        q, filled.cache, 0, tables, starts, lengths, num_decodes=int(queries == 1),
        max_query_len=queries, max_seq_len=total, scale=SIZE**-0.5,
    )  # fmt: skip
    exact = reference.attention(
        q.double(), filled.keys.double()[None], filled.values.double()[None],
        torch.zeros_like(tables[:, :1]), starts, lengths, reference.AttentionOptions(SIZE**-0.5),
    )  # fmt: skip
    return (out.double() - exact).abs().max().item()


def int64_table(bench: Bench, ops: TritonOps) -> Table:
    """AssertionError where a value is wrong."""
    filled = fill(bench, ops)
    cache = filled.cache
    rows: list[dict[str, str | float | int]] = []
    for name, queries in (("decode", 1), ("prefill", filled.keys.shape[0] // 2)):
        error = attention_error(ops, filled, queries)
        assert error < 2e-2, f"{name} at the highest blocks is off by {error}"
        rows.append({"what": name, "largest error": error})
    highest, lowest = int(filled.blocks.max()), int(filled.blocks.min())
    pairs = [(highest, 0), (lowest, lowest - 1)]
    cache.copy_blocks(pairs)
    for source, target in pairs:
        copied = zip(cache.read_block(0, source), cache.read_block(0, target), strict=True)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in copied)
    rows.append({"what": "copies of blocks", "largest error": 0})
    elements = cache.layers[0].keys.numel()
    note = f"{elements:,} elements in K, {elements:,} in V; blocks from {lowest:,} up"
    return Table("Cache beyond 2^31 elements", note, rows)
