"""The CPU backend: C++ kernels that attend over the paged cache in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps
from chairlift_kernels.cpu.kv_cache import KvCache
from chairlift_kernels.cpu.kv_cache import LayerShape as CacheShape

from .attention import AttentionOptions, HeadNorms, LayerShape, StepBatch
from .kv_cache import BlockCopy


class CpuAttention:
    """Sixteen keys share a vector register; ``chairlift_kernels.cpu`` owns that layout."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._cache: KvCache

    def allocate(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shapes = [CacheShape(*layer) for layer in layers]
        self._cache = self._ops.allocate_cache(shapes, num_blocks, block_size, dtype)

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        self._cache.write(layer, key, value, batch.slot_mapping)

    def rope_and_write(
        self,
        layer: int,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: StepBatch,
        num_heads: int,
        norms: HeadNorms | None,
    ) -> Tensor:
        cache, slots = self._cache, batch.slot_mapping
        if norms is None:
            return self._ops.rope_and_cache(qkv, cos, sin, cache, layer, slots, num_heads=num_heads)
        return self._ops.rope_and_cache(
            qkv,
            cos,
            sin,
            cache,
            layer,
            slots,
            num_heads=num_heads,
            q_norm=norms.query,
            k_norm=norms.key,
            eps=norms.eps,
            unit_offset=norms.unit_offset,
        )

    def attend(
        self, layer: int, query: Tensor, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        if query.stride(-1) != 1:
            query = query.contiguous()
        return self._ops.attend(
            query,
            self._cache,
            layer,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self._cache.copy_blocks(copies)
