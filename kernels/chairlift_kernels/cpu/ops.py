"""CPU operators for the engine, called on torch tensors' memory through ctypes.

ctypes releases the interpreter lock, so the engine's other threads run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .bindings import bind
from .build import load_library
from .decoder import LayerWeights, Normalisation, PackedDecoder
from .kv_cache import KvCache, LayerShape, checked_index
from .linear import (
    Activation,
    PackedGateUp,
    PackedLinear,
    activation_code,
    pack_gate_up,
    pack_linear,
)
from .weight_memory import WeightMemory

_MAX_HEAD_DIM = 512  # elementwise.cpp: kMaxHeadDim


class CpuOps:
    """Fused operators with fp32 accumulation; a row's result does not depend on its batch.

    Constructing one builds (seconds, once per machine) or loads (milliseconds) the library and
    raises CpuKernelsUnavailable where that cannot be done.
    """

    def __init__(self, variant: str = "native") -> None:
        self._library = load_library(variant)
        bind(self._library)
        self._weight_memory = WeightMemory(self._library)
        self.instructions: str = self._library.chairlift_instructions().decode()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Pack weight [N, K] bf16 (any N, K) and bias [N]."""
        return pack_linear(self._library, self._weight_memory, weight, bias)

    def linear(
        self,
        x: Tensor,
        packed: PackedLinear,
        *,
        residual: Tensor | None = None,
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:
        """x [M, K] bf16 -> x W^T + bias + residual [M, N], rounded once, to bf16 or fp32."""
        rows, stride = _rows_of(x, packed.in_features)
        out = torch.empty((rows, packed.out_features), dtype=out_dtype)
        if residual is not None and not (
            residual.dtype == torch.bfloat16
            and residual.shape == out.shape
            and residual.is_contiguous()
        ):
            raise ValueError(f"residual must be contiguous bf16 {tuple(out.shape)}")
        self._library.chairlift_linear(
            *(x.data_ptr(), stride, rows, packed.in_features),
            *(packed.panels_at, packed.out_features, packed.bias_at),
            None if residual is None else residual.data_ptr(),
            *(out.data_ptr(), _is_fp32(out_dtype), None, torch.get_num_threads()),
        )
        return out

    def pack_gate_up(self, gate: Tensor, up: Tensor) -> PackedGateUp:
        """Pack the gate and up weights [I, K] bf16 of a gated MLP."""
        return pack_gate_up(self._library, self._weight_memory, gate, up)

    def gate_up(self, x: Tensor, packed: PackedGateUp, activation: Activation) -> Tensor:
        """x [M, K] bf16 -> act(x G^T) * (x U^T) [M, I] bf16, rounded once."""
        rows, stride = _rows_of(x, packed.in_features)
        out = torch.empty((rows, packed.inner_features), dtype=torch.bfloat16)
        self._library.chairlift_gate_up(
            *(x.data_ptr(), stride, rows, packed.in_features),
            *(packed.panels_at, packed.inner_features, activation_code(activation)),
            *(out.data_ptr(), packed.inner_features, None, torch.get_num_threads()),
        )
        return out

    def pack_decoder(
        self,
        layers: Sequence[LayerWeights],
        num_heads: int,
        activation: Activation,
        norms: Normalisation,
    ) -> PackedDecoder:
        """Llama-shaped layers, alike in shape, as one call over a bf16 cache."""
        return PackedDecoder(self._library, layers, num_heads, activation, norms)

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        unit_offset: bool = False,
    ) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension; x [M, H] bf16 or fp32.

        With `residual` [M, H]: residual += x in place, and the norm is of the sum. Llama rounds
        before it multiplies by the weight; `unit_offset` is Gemma's (1 + weight), rounded once.
        """
        is_float = _is_fp32(x.dtype)
        x = x.contiguous()
        for name, other in (("weight", weight), ("residual", residual)):
            if other is not None and not (other.dtype == x.dtype and other.is_contiguous()):
                raise ValueError(f"{name} must be contiguous {x.dtype}")
        if residual is not None and residual.shape != x.shape:
            raise ValueError(f"residual is {tuple(residual.shape)}, x is {tuple(x.shape)}")
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"weight is {tuple(weight.shape)}, x is {tuple(x.shape)}")
        out = torch.empty_like(x)
        self._library.chairlift_rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            *(weight.data_ptr(), out.data_ptr(), x.shape[-1]),
            *(x.numel() // x.shape[-1], x.shape[-1]),
            *(eps, unit_offset, is_float, torch.get_num_threads()),
        )
        return out

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """gate_up [M, 2I] bf16 or fp32 -> act(gate_up[:, :I]) * gate_up[:, I:] [M, I]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        gate_up = gate_up.contiguous()
        out = torch.empty((rows, width), dtype=gate_up.dtype)
        self._library.chairlift_gated_activation(
            *(gate_up.data_ptr(), out.data_ptr(), rows, width, activation_code(activation)),
            *(_is_fp32(gate_up.dtype), torch.get_num_threads()),
        )
        return out

    def best_token(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax of logits [S, V] bf16 or fp32: ids int64 [S] and their values fp32 [S].

        The lowest id wins a tie, and a NaN over all.
        """
        rows, width = logits.shape
        if not width or (width > 1 and logits.stride(1) != 1):
            raise ValueError(f"logits must be [S, V] with unit last stride, not {logits.shape}")
        ids = torch.empty(rows, dtype=torch.int64)
        values = torch.empty(rows, dtype=torch.float32)
        self._library.chairlift_best_token(
            *(logits.data_ptr(), logits.stride(0), rows, width),
            *(ids.data_ptr(), values.data_ptr()),
            *(_is_fp32(logits.dtype), torch.get_num_threads()),
        )
        return ids, values

    def allocate_cache(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> KvCache:
        """A cache of one (heads, key_dim, value_dim) per layer; bytes_per_block sizes it."""
        return KvCache(self._library, shapes, num_blocks, block_size, dtype)

    def rope_and_cache(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KvCache,
        layer: int,
        slot_mapping: Tensor,
        *,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> Tensor:
        """Rotate the queries and keys of qkv [T, (H + 2 Hkv) D]; return q [T, H, D].

        Keys and values go to the cache at slot_mapping int64 [T] (-1: nowhere). cos and sin [T, R]
        turn the first R dimensions of a head, after the optional norm of each q and k head [D].
        """
        shape = cache.shapes[layer]
        tokens, width = qkv.shape
        angles = cos.shape[1]
        needed = (num_heads + shape.heads) * shape.key_dim + shape.heads * shape.value_dim
        if qkv.dtype != cache.dtype or width != needed or qkv.stride(1) != 1:
            raise ValueError(
                f"qkv must be {cache.dtype} [T, {needed}], not {qkv.dtype} {tuple(qkv.shape)}"
            )
        if cos.shape != sin.shape or cos.dtype != sin.dtype or cos.shape[0] != tokens:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be [T, R]")
        if angles % 2 or angles > shape.key_dim or shape.key_dim > _MAX_HEAD_DIM:
            raise ValueError(f"cannot turn {angles} of {shape.key_dim} dimensions")
        cos, sin = cos.contiguous(), sin.contiguous()
        slots = checked_index(slot_mapping, torch.int64, "slot_mapping")
        q = torch.empty((tokens, num_heads, shape.key_dim), dtype=qkv.dtype)
        self._library.chairlift_rope_and_cache(
            *(qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), angles),
            *(_is_fp32(cos.dtype), *cache.arguments[layer], slots.data_ptr(), q.data_ptr()),
            *(tokens, num_heads, _norm_pointer(q_norm, qkv), _norm_pointer(k_norm, qkv)),
            *(eps, unit_offset, cache.is_float, torch.get_num_threads()),
        )
        return q

    def attend(
        self,
        q: Tensor,
        cache: KvCache,
        layer: int,
        block_tables: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of q [T, H, D] over the paged cache -> [T, H, Dv].

        Sequence r has the queries query_start[r]:query_start[r+1] (int32 [R+1]), its last tokens;
        its seq_lens[r] keys, the new ones included, lie in block_tables[r] (int32 [R, N]). A query
        sees keys with q_pos - k_pos < window. `softcap` c: c tanh(score / c). `sinks` [H]: a score
        per head that takes weight and gives no value.
        """
        shape = cache.shapes[layer]
        tokens, heads, dim = q.shape
        if q.dtype != cache.dtype or dim != shape.key_dim or q.stride(2) != 1:
            raise ValueError(
                f"q must be {cache.dtype} [T, H, {shape.key_dim}] with unit last stride,"
                f" not {q.dtype} {tuple(q.shape)}"
            )
        if heads % shape.heads or scale <= 0:
            raise ValueError(f"{heads} heads over {shape.heads} KV heads, scale {scale}")
        if out is None:
            out = torch.empty((tokens, heads, shape.value_dim), dtype=q.dtype)
        elif out.shape != (tokens, heads, shape.value_dim) or out.dtype != q.dtype:
            raise ValueError(f"out is {out.dtype} {tuple(out.shape)}")
        tables = checked_index(block_tables, torch.int32, "block_tables")
        starts = checked_index(query_start, torch.int32, "query_start")
        lengths = checked_index(seq_lens, torch.int32, "seq_lens")
        wide_sinks = None if sinks is None else sinks.detach().float().contiguous()
        self._library.chairlift_attend(
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(out.data_ptr(), out.stride(0), out.stride(1), *cache.arguments[layer]),
            *(tables.data_ptr(), tables.shape[1], starts.data_ptr(), lengths.data_ptr()),
            *(lengths.shape[0], heads, scale, window or 0, softcap or 0.0),
            None if wide_sinks is None else wide_sinks.data_ptr(),
            *(cache.is_float, torch.get_num_threads()),
        )
        return out


def _norm_pointer(weight: Tensor | None, like: Tensor) -> int | None:
    if weight is None:
        return None
    if weight.dtype != like.dtype or not weight.is_contiguous():
        raise ValueError(f"head norm weights must be contiguous {like.dtype}")
    return weight.data_ptr()


def _rows_of(x: Tensor, width: int) -> tuple[int, int]:
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != width or x.stride(1) != 1:
        raise ValueError(
            f"x must be bf16 [M, {width}] with unit last stride, not {x.dtype} {tuple(x.shape)}"
        )
    return x.shape[0], x.stride(0)


def _is_fp32(dtype: torch.dtype) -> int:
    if dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"bf16 or fp32, not {dtype}")
    return int(dtype == torch.float32)
