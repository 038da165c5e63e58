"""Attention backends: each owns its KV cache and is the only one that knows its layout.

A backend allocates the cache, writes a step's keys and values, attends over block tables, and
copies blocks. transformers' attention modules reach it through the attention interface:
``attend_from_model`` is registered under ``INTERFACE_NAME`` and finds the step's ``StepBatch``
among its keyword arguments.
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


class FusedAttentionBackend(AttentionBackend, Protocol):
    """A backend whose kernels also turn, norm, and store in one pass; fused modules need it."""

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
        """``qkv`` [T, (H + 2 Hkv) * D] -> rotated queries [T, H, D]; keys and values are stored.

        ``cos`` and ``sin`` are [T, R]; the first R dimensions of each head turn.
        """


class HeadNorms(NamedTuple):
    """RMS norms of every query and key head, before they turn; weights [D]."""

    query: Tensor
    key: Tensor
    eps: float
    unit_offset: bool


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
    """transformers' attention interface: query [1, H, T, D], key and value [1, Hkv, T, D].

    transformers makes no mask for an implementation it doesn't know: one that is there is the
    model's own and says more than causality and a window.
    """
    if attention_mask is not None:
        raise ValueError("the model brings an attention mask of its own")
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
