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
        if residual is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is not None:
            return F.linear(x, self._weight, self._bias).add_(residual)
        return torch.addmm(residual, x, self._weight.t())


class KernelLinear:
    """Weights packed once; the residual is added before the only rounding."""

    def __init__(self, ops: Any, weight: Tensor, bias: Tensor | None) -> None:
        self._ops = ops
        self.packed = ops.pack_linear(weight, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out: Tensor = self._ops.linear(x, self.packed, residual=residual)
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
        self.packed = ops.pack_gate_up(gate, up)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.gate_up(x, self.packed, self.activation)
        return out


class PackedLinear(nn.Module):
    """A packed layer in a module that isn't fused: [..., K] -> [..., N]."""

    def __init__(self, ops: Any, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = make_linear(ops, linear)

    def forward(self, x: Tensor) -> Tensor:
        out = self._linear(x.reshape(-1, x.shape[-1]))
        return out.view(*x.shape[:-1], out.shape[-1])


class LogitsHead(nn.Module):
    """The output layer with float32 logits from packed weights: [1, S, K] -> [1, S, V]."""

    def __init__(self, ops: Any, head: nn.Linear) -> None:
        super().__init__()
        self._ops = ops
        bias = None if head.bias is None else head.bias.detach()
        self._packed = ops.pack_linear(head.weight.detach(), bias)

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.rows(hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], logits.shape[-1])  # a step may sample no row

    def rows(self, x: Tensor) -> Tensor:
        """[S, K] -> [S, V]."""
        logits: Tensor = self._ops.linear(x, self._packed, out_dtype=torch.float32)
        return logits


def packs(ops: Any, weight: Tensor) -> bool:
    """Do the kernels have a packed form for this weight? (The CPU's is for bf16 alone.)"""
    return hasattr(ops, "pack_linear") and weight.dtype == torch.bfloat16


def make_linear(ops: Any, *linears: nn.Linear) -> Linear:
    """One linear layer out of several that read the same input."""
    weights = [linear.weight.detach() for linear in linears]
    biases = [
        weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
        for linear, weight in zip(linears, weights, strict=True)
    ]
    biased = any(linear.bias is not None for linear in linears)
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = torch.cat(biases) if biased else None
    return KernelLinear(ops, weight, bias) if packs(ops, weight) else TorchLinear(weight, bias)


def make_gated(ops: Any, gate: Tensor, up: Tensor, activation: Activation) -> GatedLinear:
    """Weights [I, K]."""
    kind = KernelGated if packs(ops, gate) else TorchGated
    return kind(ops, gate, up, activation)
