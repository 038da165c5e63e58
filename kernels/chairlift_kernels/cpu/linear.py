"""Linear layers over weights packed once at load."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .weight_memory import WeightMemory

Activation = Literal["silu", "gelu_tanh", "gelu"]
_PANEL, _PAIR, _STEP = 16, 32, 32  # matmul.h: columns of a panel and of a pair, k of a tile


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A [out_features, in_features] bf16 weight as zero-padded panels and its fp32 bias."""

    in_features: int
    out_features: int
    panels: Tensor
    bias: Tensor | None
    panels_at: int  # data_ptr() of the two tensors: read on every call
    bias_at: int | None


@dataclass(frozen=True, slots=True)
class PackedGateUp:
    """The gate and up weights [inner_features, in_features] of a gated MLP in alternate panels."""

    in_features: int
    inner_features: int
    panels: Tensor
    panels_at: int


def activation_code(activation: Activation) -> int:
    """The number vector.h knows an activation by."""
    names = get_args(Activation)
    if activation not in names:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(names)}")
    return names.index(activation)


def pack_linear(
    library: ctypes.CDLL, memory: WeightMemory, weight: Tensor, bias: Tensor | None
) -> PackedLinear:
    """Copy weight [N, K] into panels; the caller may free the original."""
    n, k = _check_weight(weight)
    panels = _empty_panels(memory, _round_up(n, _PAIR), k)
    _pack(library, weight, panels, first_slot=0, slot_stride=1)
    wide = None if bias is None else bias.detach().float().contiguous()
    if wide is not None and wide.shape != (n,):
        raise ValueError(f"bias has shape {tuple(wide.shape)}, weight has {n} rows")
    return PackedLinear(
        *(k, n, panels, wide, panels.data_ptr()), None if wide is None else wide.data_ptr()
    )


def pack_gate_up(
    library: ctypes.CDLL, memory: WeightMemory, gate: Tensor, up: Tensor
) -> PackedGateUp:
    """Copy gate and up [I, K] into alternating panels, so that one pass computes act(gate) * up."""
    inner, k = _check_weight(gate)
    if _check_weight(up) != (inner, k):
        raise ValueError(f"gate is {tuple(gate.shape)}, up is {tuple(up.shape)}")
    panels = _empty_panels(memory, 2 * _round_up(inner, _PANEL), k)
    _pack(library, gate, panels, first_slot=0, slot_stride=2)
    _pack(library, up, panels, first_slot=1, slot_stride=2)
    return PackedGateUp(k, inner, panels, panels.data_ptr())


def _check_weight(weight: Tensor) -> tuple[int, int]:
    if weight.dtype != torch.bfloat16 or weight.dim() != 2 or weight.device.type != "cpu":
        raise TypeError(f"weights are [N, K] bf16 on the CPU, not {weight.dtype} {weight.dim()}-d")
    return weight.shape[0], weight.shape[1]


def _empty_panels(memory: WeightMemory, columns: int, k: int) -> Tensor:
    # Zeros: columns beyond N in the last pair are multiplied, though never written out.
    return memory.zeros(columns * _round_up(k, _STEP))


def _pack(
    library: ctypes.CDLL, weight: Tensor, panels: Tensor, first_slot: int, slot_stride: int
) -> None:
    rows = weight.detach()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    library.chairlift_pack(
        *(rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)),
        *(panels.data_ptr(), first_slot, slot_stride, torch.get_num_threads()),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
