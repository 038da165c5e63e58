"""The reference backend in plain torch: any device, any option; slow and easy to check."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .attention import AttentionOptions, LayerShape, StepBatch
from .kv_cache import BlockCopy


class TorchAttention:
    """The plain reference: gathers each row's pages and calls torch operators. Cache layout
    [num_blocks, block_size, Hkv, D]."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def allocate(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pages(heads: int, dim: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)

        self._keys = [pages(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self._values = [pages(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        for cache, new in ((self._keys[layer], key), (self._values[layer], value)):
            cache.view(-1, *cache.shape[2:])[batch.slot_mapping] = new.to(cache.dtype)

    def attend(
        self, layer: int, query: Tensor, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        starts = batch.query_start.tolist()
        lengths = batch.seq_lens.tolist()
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for row, length in enumerate(lengths):
            tokens = slice(starts[row], starts[row + 1])
            pages = batch.block_tables[row, : -(-length // keys.shape[1])].long()
            k = keys[pages].flatten(0, 1)[:length]
            v = values[pages].flatten(0, 1)[:length]
            out[tokens] = _attend_row(query[tokens], k, v, options)
        return out

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        sources = [copy.source for copy in copies]
        targets = [copy.target for copy in copies]
        for cache in self._keys + self._values:
            cache[targets] = cache[sources]


def _attend_row(query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of a row's last tokens: [t, H, Dk] over [n, Hkv, D] -> [t, H, Dv]."""
    num_new, num_heads, _ = query.shape
    length, num_kv_heads, _ = keys.shape
    grouped = (num_kv_heads, num_heads // num_kv_heads, *query.transpose(0, 1).shape[1:])
    q = query.transpose(0, 1).reshape(grouped).float()
    scores = torch.einsum("kgtd,nkd->kgtn", q, keys.float()) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    q_pos = torch.arange(length - num_new, length, device=query.device)[:, None]
    k_pos = torch.arange(length, device=query.device)[None]
    visible = k_pos <= q_pos
    if options.window is not None:
        visible &= q_pos - k_pos < options.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_new, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = torch.einsum("kgtn,nkd->tkgd", weights, values.float())
    return out.flatten(1, 2).to(query.dtype)
