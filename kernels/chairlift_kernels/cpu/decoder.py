"""A stack of Llama-shaped decoder layers as one call into the library (decoder.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .kv_cache import KvCache, checked_index
from .linear import Activation, PackedGateUp, PackedLinear, activation_code

_LINE = 32  # bf16 elements of a cache line
_P, _L, _D = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


def _fields(pointers: str, integers: str = "", doubles: str = "") -> list[tuple[str, type]]:
    named = ((pointers, _P), (integers, _L), (doubles, _D))
    return [(name, kind) for names, kind in named for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = _fields(
        "attention_norm mlp_norm qkv out gate_up down q_norm k_norm"
        " qkv_bias out_bias down_bias sinks cache",
        "window",
        "scale softcap",
    )


class _Shape(ctypes.Structure):
    _fields_ = _fields(
        "",
        "hidden heads kv_heads key_dim value_dim inner block_size activation unit_offset",
        "eps head_eps",
    )


class _Batch(ctypes.Structure):
    _fields_ = _fields(
        "hidden cos sin slots tables starts lengths normed qkv query attended middle gated",
        "tokens rows table_width angles angles_are_float"
        " normed_stride attended_stride gated_stride",
    )


class LayerWeights(NamedTuple):
    """One layer's packed weights, its norms [hidden] and [head_dim] in bf16, and how it attends."""

    attention_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedGateUp
    down: PackedLinear
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class Normalisation(NamedTuple):
    """The epsilons of the layers' norms and of the head norms, and Gemma's (1 + weight) form."""

    eps: float
    head_eps: float
    unit_offset: bool


class PackedDecoder:
    """Runs all layers over one cache; what it computes is what its operators compute one by one."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerWeights],
        num_heads: int,
        activation: Activation,
        norms: Normalisation,
    ) -> None:
        self._library = library
        self._weights = list(layers)  # keeps alive what the structures point to
        self._num_heads = num_heads
        self._activation = activation_code(activation)
        self._norms = norms
        self._cache: KvCache | None = None
        self._layers = (_Layer * len(layers))()
        self._shape = _Shape()

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KvCache,
        slots: Tensor,
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
    ) -> None:
        """Change hidden [T, H] bf16 in place; the other arguments are those of CpuOps.attend."""
        if hidden.dtype != torch.bfloat16 or not hidden.is_contiguous():
            raise ValueError(f"hidden must be contiguous bf16, not {hidden.dtype}")
        if cache is not self._cache:
            self._bind(cache)
        shape, tokens = self._shape, hidden.shape[0]
        cos, sin = cos.contiguous(), sin.contiguous()
        normed = _row_stride(shape.hidden)
        attended = _row_stride(shape.heads * shape.value_dim)
        gated = _row_stride(shape.inner)
        widths = (
            normed,
            (shape.heads + shape.kv_heads) * shape.key_dim + shape.kv_heads * shape.value_dim,
            shape.heads * shape.key_dim,
            attended,
            shape.hidden,
            gated,
        )
        scratch = [torch.empty((tokens, width), dtype=torch.bfloat16) for width in widths]
        batch = _Batch(
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            checked_index(slots, torch.int64, "slots").data_ptr(),
            checked_index(tables, torch.int32, "tables").data_ptr(),
            checked_index(starts, torch.int32, "starts").data_ptr(),
            checked_index(lengths, torch.int32, "lengths").data_ptr(),
            *(tensor.data_ptr() for tensor in scratch),
            *(tokens, lengths.shape[0], tables.shape[1], cos.shape[1]),
            *(int(cos.dtype == torch.float32), normed, attended, gated),
        )
        self._library.chairlift_decoder(
            self._layers,
            len(self._weights),
            ctypes.byref(shape),
            ctypes.byref(batch),
            torch.get_num_threads(),
        )

    def _bind(self, cache: KvCache) -> None:
        """Point the structures at the weights and at this cache's layers."""
        first, (heads, key_dim, value_dim) = self._weights[0], cache.shapes[0]
        self._shape = _Shape(
            *(first.qkv.in_features, self._num_heads, heads, key_dim, value_dim),
            *(first.gate_up.inner_features, cache.block_size, self._activation),
            *(int(self._norms.unit_offset), self._norms.eps, self._norms.head_eps),
        )
        for target, weights, arguments in zip(
            self._layers, self._weights, cache.arguments, strict=True
        ):
            target.attention_norm = weights.attention_norm.data_ptr()
            target.mlp_norm = weights.mlp_norm.data_ptr()
            target.qkv, target.qkv_bias = weights.qkv.panels_at, weights.qkv.bias_at
            target.out, target.out_bias = weights.out.panels_at, weights.out.bias_at
            target.gate_up = weights.gate_up.panels_at
            target.down, target.down_bias = weights.down.panels_at, weights.down.bias_at
            for name in ("q_norm", "k_norm", "sinks"):
                tensor = getattr(weights, name)
                setattr(target, name, None if tensor is None else tensor.data_ptr())
            target.cache = arguments[0]
            target.window = weights.window or 0
            target.scale, target.softcap = weights.scale, weights.softcap or 0.0
        self._cache = cache


def _row_stride(width: int) -> int:
    """An odd number of cache lines, so that the sixteen rows of a tile lie in different sets of L1.

    A product with rows of 1,536 elements takes 0.9 of the time so; one of 576, 0.85.
    """
    return (-(-width // _LINE) | 1) * _LINE
