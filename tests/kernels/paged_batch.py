"""Batches of paged attention whose every unused cache entry is NaN, and their float64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from chairlift_kernels import reference
from chairlift_kernels.kv_cache import KvCache
from chairlift_kernels.ops import TritonOps

# Largest error allowed, relative to max(1, |value|): a few roundings of the output type.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Layer(NamedTuple):
    """One attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int = 16


class Batch(NamedTuple):
    """Rows of (query tokens, keys with them); tables are as wide as the longest row needs."""

    q: torch.Tensor
    cache: KvCache
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def attend(
        self, ops: TritonOps, options: reference.AttentionOptions | None = None
    ) -> torch.Tensor:
        """The kernels' answer; leading rows of one query token go to the decode shape."""
        options = options or self.plain()
        decodes = next((i for i, n in enumerate(self.queries) if n != 1), len(self.queries))
        return ops.attend(
            self.q, self.cache, 0, self.tables, self.starts, self.lengths,
            num_decodes=decodes, max_query_len=max(self.queries), max_seq_len=max(self.keys),
            **options._asdict(),
        )  # fmt: skip

    def plain(self) -> reference.AttentionOptions:
        return reference.AttentionOptions(scale=self.q.shape[-1] ** -0.5)

    def expected(self, options: reference.AttentionOptions | None = None) -> torch.Tensor:
        """The same in float64 from the same rounded inputs."""
        layer = self.cache.layers[0]
        keys, values = layer.keys.double(), layer.values.double()
        if layer.scales is not None:
            keys = keys * layer.scales.keys[:, None]
            values = values * layer.scales.values[:, None]
        return reference.attention(
            self.q.double(), keys, values, self.tables, self.starts, self.lengths,
            options or self.plain(),
        )  # fmt: skip


def build(
    ops: TritonOps,
    rows: Sequence[tuple[int, int]],
    layer: Layer,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    scales: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Batch:
    """Rows of (query tokens, keys) over shuffled blocks; block 0 is nobody's."""
    generator = torch.Generator().manual_seed(len(rows) + layer.key_dim)
    shape = (layer.kv_heads, layer.key_dim, layer.value_dim)
    counts = [-(-keys // layer.block_size) for _, keys in rows]
    cache = ops.allocate_cache(
        [shape], sum(counts) + 2, layer.block_size, cache_dtype or dtype, scales
    )
    for part in cache.layers[0][:2]:
        part.fill_(float("nan"))
    blocks = torch.randperm(sum(counts) + 1, generator=generator) + 1
    tables = torch.zeros(len(rows), max(1, *counts, 1), dtype=torch.int32)
    for row, own in enumerate(blocks[: sum(counts)].split(counts)):
        tables[row, : len(own)] = own
        places = torch.arange(rows[row][1])
        slots = own[places // layer.block_size] * layer.block_size + places % layer.block_size
        for index, dim in enumerate(shape[1:]):
            x = torch.randn(len(slots), layer.kv_heads, dim, generator=generator).to(dtype)
            _write(cache, index, x.to(ops.device), slots.to(ops.device))
    queries = tuple(n for n, _ in rows)
    starts = torch.tensor((0, *queries), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = torch.randn(sum(queries), layer.heads, layer.key_dim, generator=generator).to(dtype)
    lengths = torch.tensor([keys for _, keys in rows], dtype=torch.int32)
    on_device = (x.to(ops.device) for x in (tables, starts, lengths))
    return Batch(q.to(ops.device), cache, *on_device, queries, tuple(keys for _, keys in rows))


def _write(cache: KvCache, index: int, x: torch.Tensor, slots: torch.Tensor) -> None:
    """Keys (index 0) or values (1) into layer 0, without the kernel that does it in earnest."""
    layer = cache.layers[0]
    if layer.scales is not None:
        x = x.float() / layer.scales[index][:, None]
    reference.write_slots(layer[index], x, slots)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Every element is within the tolerance of the type, and none is NaN."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs() / expected.abs().clamp(min=1)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= TOLERANCE[dtype], f"off by {worst:.2e}, allowed {TOLERANCE[dtype]:.2e}"
