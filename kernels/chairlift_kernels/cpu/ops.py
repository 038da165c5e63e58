"""CPU operators for the engine, called on torch tensors' memory through ctypes.

ctypes releases the interpreter lock, so the engine's other threads run meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bindings import bind
from .build import load_library
from .linear import (
    Activation,
    PackedGateUp,
    PackedLinear,
    activation_code,
    pack_gate_up,
    pack_linear,
)


class CpuOps:
    """Fused operators with fp32 accumulation; a row's result does not depend on its batch.

    Constructing one builds (seconds, once per machine) or loads (milliseconds) the library and
    raises CpuKernelsUnavailable where that cannot be done.
    """

    def __init__(self, variant: str = "native") -> None:
        self._library = load_library(variant)
        bind(self._library)
        self.instructions: str = self._library.chairlift_instructions().decode()

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Pack weight [N, K] bf16 (any N, K) and bias [N]."""
        return pack_linear(self._library, weight, bias)

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
            *(out.data_ptr(), _is_fp32(out_dtype), torch.get_num_threads()),
        )
        return out

    def pack_gate_up(self, gate: Tensor, up: Tensor) -> PackedGateUp:
        """Pack the gate and up weights [I, K] bf16 of a gated MLP."""
        return pack_gate_up(self._library, gate, up)

    def gate_up(self, x: Tensor, packed: PackedGateUp, activation: Activation) -> Tensor:
        """x [M, K] bf16 -> act(x G^T) * (x U^T) [M, I] bf16, rounded once."""
        rows, stride = _rows_of(x, packed.in_features)
        out = torch.empty((rows, packed.inner_features), dtype=torch.bfloat16)
        self._library.chairlift_gate_up(
            *(x.data_ptr(), stride, rows, packed.in_features),
            *(packed.panels_at, packed.inner_features, activation_code(activation)),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out


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
