"""Linear layers as the fused modules use them: packed for the kernels, or torch's own."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = str  # "silu", "gelu" or "gelu_tanh"


class Linear(Protocol):
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x`` [T, K] -> x W^T + bias (+ residual) [T, N]."""


class GatedLinear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [T, K] -> act(x G^T) * (x U^T) [T, I]."""


class TorchLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = F.linear(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)


class KernelLinear:
    """Weights packed once; the residual is added before the only rounding."""

    def __init__(self, ops: Any, weight: Tensor, bias: Tensor | None) -> None:
        self._ops = ops
        self._packed = ops.pack_linear(weight, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out: Tensor = self._ops.linear(x, self._packed, residual=residual)
        return out


class TorchGated:
    def __init__(self, ops: Any, gate: Tensor, up: Tensor, activation: Activation) -> None:
        self._ops = ops
        self._weight = torch.cat([gate, up])
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        both = F.linear(x, self._weight)
        out: Tensor = self._ops.gated_activation(both, self._activation)
        return out


class KernelGated:
    def __init__(self, ops: Any, gate: Tensor, up: Tensor, activation: Activation) -> None:
        self._ops = ops
        self._packed = ops.pack_gate_up(gate, up)
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.gate_up(x, self._packed, self._activation)
        return out


class LogitsHead(nn.Module):
    """The output layer with float32 logits from packed weights: [1, S, K] -> [1, S, V]."""

    def __init__(self, ops: Any, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight  # tied to the embedding in many models; the engine asks its shape
        self._ops = ops
        self._packed = ops.pack_linear(head.weight.detach(), head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._ops.linear(
            hidden.reshape(-1, hidden.shape[-1]), self._packed, out_dtype=torch.float32
        )
        return logits[None]


def packs(ops: Any, weight: Tensor) -> bool:
    """Do the kernels have a packed form for this weight? (The CPU's is for bf16 alone.)"""
    return hasattr(ops, "pack_linear") and weight.dtype == torch.bfloat16


def make_linear(ops: Any, *linears: nn.Linear) -> Linear:
    """One linear layer out of several that read the same input."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias for linear in linears]
    if any(bias is not None for bias in biases):
        filled = [
            linear.bias.detach()
            if linear.bias is not None
            else weight.new_zeros(len(linear.weight))
            for linear in linears
        ]
        bias = torch.cat(filled)
    else:
        bias = None
    return KernelLinear(ops, weight, bias) if packs(ops, weight) else TorchLinear(weight, bias)


def make_gated(ops: Any, gate: nn.Linear, up: nn.Linear, activation: Activation) -> GatedLinear:
    weights = gate.weight.detach(), up.weight.detach()
    kind = KernelGated if packs(ops, weights[0]) else TorchGated
    return kind(ops, *weights, activation)
