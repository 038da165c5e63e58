"""Attention backends: each owns its KV cache and is the only one that knows its layout.

A backend allocates the cache, writes a step's keys and values, attends over block tables, and copies
blocks. transformers' attention modules reach it through the attention interface: ``attend_from_model``
is registered under ``INTERFACE_NAME`` and finds the step's ``StepBatch`` among its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from .kv_cache import BlockCopy

# Not "paged|...", not "flash...", and without "/": transformers gives all three a meaning.
INTERFACE_NAME = "chairlift_paged"


class LayerShape(NamedTuple):
    """What one attention layer keeps per token: KV heads, and the sizes of a key and a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class AttentionOptions(NamedTuple):
    """How one layer attends. ``window`` counts the current token; ``sinks`` is [H] or None."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class StepBatch(NamedTuple):
    """A step's tensors. T tokens of R rows; rows with one query token come first.

    ``input_ids``, ``positions`` [T] int64; ``slot_mapping`` [T] int64, the cache slot of each token
    (block * block_size + offset); ``block_tables`` [R, W] int32; ``query_start`` [R + 1] int32;
    ``seq_lens`` [R] int32, keys per row with this step's; ``logit_rows`` [S] int64.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    logit_rows: Tensor
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    backend: AttentionBackend


class AttentionBackend(Protocol):
    """``allocate`` first, then once per layer and step ``write`` and ``attend``, in this order.

    All rows' keys and values of a layer are in the cache before any row attends: requests of the
    same step may share blocks that are written in it.
    """

    def allocate(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        """``key`` [T, Hkv, Dk] and ``value`` [T, Hkv, Dv], any strides, into the batch's slots."""

    def attend(
        self, layer: int, query: Tensor, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        """``query`` [T, H, Dk], any strides -> [T, H, Dv]."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None: ...


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
    q = query.transpose(0, 1).unflatten(0, (num_kv_heads, num_heads // num_kv_heads)).float()
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


class ShapeProbe:
    """A backend without a cache: a forward over it tells what every layer stores and asks for."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.options: dict[int, AttentionOptions] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, batch: StepBatch) -> None:
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])

    def attend(
        self, layer: int, query: Tensor, batch: StepBatch, options: AttentionOptions
    ) -> Tensor:
        self.options[layer] = options
        return query.new_zeros(*query.shape[:2], self.shapes[layer].value_dim)

    def allocate(self, *_: Any) -> None:
        raise NotImplementedError("a probe keeps nothing")

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        raise NotImplementedError("a probe keeps nothing")


def attend_from_model(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    batch: StepBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    options = AttentionOptions(scale, sliding_window, softcap, s_aux)
    batch.backend.write(layer, k, v, batch)
    return batch.backend.attend(layer, q, batch, options)[None], None


def register() -> None:
    """Make the interface known to transformers; calling it again changes nothing."""
    AttentionInterface.register(INTERFACE_NAME, attend_from_model)
