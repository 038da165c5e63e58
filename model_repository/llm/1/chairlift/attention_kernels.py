"""The backends on our kernels: C++ on a CPU, Triton-lang on a GPU, under equal names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .attention import AttentionOptions, HeadNorms, LayerShape, StepBatch
from .kv_cache import BlockCopy
from .kv_scales import LayerScales


class KernelAttention:
    """Attends over the paged cache in place; ``ops`` owns the cache's layout.

    ``ops`` is a CpuOps or a TritonOps of chairlift_kernels.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.cache: Any = None

    def allocate(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        options = self._cache_options(device)
        self.cache = self._ops.allocate_cache(layers, num_blocks, block_size, dtype, **options)

    def _cache_options(self, device: torch.device) -> dict[str, Any]:
        """What the cache of one kind of kernels takes besides."""
        return {}

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        self.cache.write(layer, key, value, batch.slot_mapping)

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
        head_norms: dict[str, Any] = {}
        if norms is not None:
            head_norms = {
                "q_norm": norms.query,
                "k_norm": norms.key,
                "eps": norms.eps,
                "unit_offset": norms.unit_offset,
            }
        query: Tensor = self._ops.rope_and_cache(
            qkv,
            cos,
            sin,
            self.cache,
            layer,
            batch.slot_mapping,
            num_heads=num_heads,
            **head_norms,
        )
        return query

    def attend(
        self, layer: int, query: Tensor, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        if query.stride(-1) != 1:
            query = query.contiguous()
        out: Tensor = self._ops.attend(
            query,
            self.cache,
            layer,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            **self._grid(batch),
        )
        return out

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.cache.copy_blocks(copies)

    def _grid(self, batch: StepBatch) -> Mapping[str, int]:
        """Host-known sizes that a launch needs beside the tensors."""
        return {}


class TritonAttention(KernelAttention):
    """On a GPU grids follow from host integers, never from what is on the device.

    ``scales`` are an e4m3 cache's, 1 without them.
    """

    scales: Sequence[LayerScales] | None = None

    def _cache_options(self, device: torch.device) -> dict[str, Any]:
        if self.scales is None:
            return {}
        scales = [
            tuple(torch.tensor(heads, dtype=torch.float32, device=device) for heads in layer)
            for layer in self.scales
        ]
        return {"scales": scales}

    def decode_lengths(self, max_model_len: int) -> list[int]:
        """Context lengths that between them need every kernel of decode attention."""
        lengths: list[int] = self._ops.decode_lengths(max_model_len)
        return lengths

    def _grid(self, batch: StepBatch) -> Mapping[str, int]:
        return {
            "num_decodes": batch.num_decodes,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
        }
