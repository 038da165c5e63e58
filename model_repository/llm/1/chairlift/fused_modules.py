"""Modules that do a transformers module's work in few kernels; fusion.py puts them in place.

Each raises ``CantFuse`` at construction where the module it should replace has another shape.
``x`` is [1, T, hidden] as transformers passes it; inside, the batch dimension is dropped.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .attention import AttentionOptions, FusedAttentionBackend, HeadNorms, StepBatch
from .linears import make_gated, make_linear


class CantFuse(Exception):
    """The module isn't of the shape that this fused module knows; the message says what differs."""


# transformers' activation classes and names that our kernels compute.
ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


class Rotation(Enum):
    """What a layer makes of the decoder's cos and sin [T, R]; pairs are always (i, i + R / 2)."""

    AS_GIVEN = "as given"
    REPEATED = "repeated"  # gpt-oss: the decoder computes each angle once
    NONE = "none"  # layers without positions, as every fourth of SmolLM3


def children(module: nn.Module) -> set[str]:
    """Names of the modules that compute anything in inference."""
    ignored = (nn.Dropout, nn.Identity)
    return {name for name, child in module.named_children() if not isinstance(child, ignored)}


def plain_linear(module: nn.Module, name: str) -> nn.Linear:
    linear = getattr(module, name)
    if type(linear) is not nn.Linear:
        raise CantFuse(f"{type(module).__name__}.{name} is a {type(linear).__name__}")
    return linear


def adopt(fused: nn.Module, original: nn.Module) -> None:
    """Keep what callers read of a module: its `attention_type` or `is_sliding` choose a mask."""
    for name, value in vars(original).items():
        if isinstance(value, (str, int, float)) and name not in vars(fused):
            setattr(fused, name, value)


class FusedNorm(nn.Module):
    """RMSNorm in the Llama form, or with ``unit_offset`` in Gemma's (1 + weight)."""

    def __init__(self, ops: Any, norm: nn.Module, unit_offset: bool) -> None:
        super().__init__()
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
            raise CantFuse(f"{type(norm).__name__} is no RMSNorm with weight and epsilon")
        self.weight = weight
        self.eps = eps
        self.unit_offset = unit_offset
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return self.rows(flat).view(x.shape)

    def rows(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out: Tensor = self._ops.rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)
        return out


class FusedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up as one matmul."""

    def __init__(self, ops: Any, mlp: nn.Module) -> None:
        super().__init__()
        found = children(mlp)
        gate, up = _gate_and_up(mlp, found)
        others = found - {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
        kinds = {type(getattr(mlp, name)).__name__ for name in others}
        activation = ACTIVATIONS.get(kinds.pop()) if len(kinds) == 1 else None
        if activation is None:
            raise CantFuse(f"{type(mlp).__name__} has {sorted(found)}")
        self.inner, self.activation = len(gate), activation
        self.gated = make_gated(ops, gate, up, activation)
        self.down = make_linear(ops, plain_linear(mlp, "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.reshape(-1, x.shape[-1])).view(x.shape)

    def rows(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.down(self.gated(x), residual)


def _gate_and_up(mlp: nn.Module, found: set[str]) -> tuple[Tensor, Tensor]:
    """Two layers, or Phi-3's one with the gate's rows first."""
    if {"gate_up_proj", "down_proj"} <= found:
        both = plain_linear(mlp, "gate_up_proj")
        linears, parts = [both], tuple(both.weight.chunk(2))
    elif {"gate_proj", "up_proj", "down_proj"} <= found:
        linears = [plain_linear(mlp, "gate_proj"), plain_linear(mlp, "up_proj")]
        parts = tuple(linear.weight for linear in linears)
    else:
        raise CantFuse(f"{type(mlp).__name__} has {sorted(found)}")
    if any(linear.bias is not None for linear in linears):
        raise CantFuse(f"{type(mlp).__name__} has biases on its gate")
    return parts[0].detach(), parts[1].detach()


class FusedAttention(nn.Module):
    """q-k-v as one matmul, then norm + rotary + KV write in one pass, attention, and o_proj."""

    def __init__(
        self,
        ops: Any,
        attention: nn.Module,
        options: AttentionOptions,
        norms: HeadNorms | None,
        rotation: Rotation,
    ) -> None:
        super().__init__()
        found = children(attention) - {"rotary_emb", "q_norm", "k_norm"}
        head_dim, layer = getattr(attention, "head_dim", None), attention.layer_idx
        if not isinstance(head_dim, int) or not isinstance(layer, int):
            raise CantFuse(f"{type(attention).__name__}: head_dim is {head_dim}, layer {layer}")
        if found == {"q_proj", "k_proj", "v_proj", "o_proj"}:
            parts = [plain_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
            num_queries = parts[0].out_features
        elif found == {"qkv_proj", "o_proj"}:
            parts = [plain_linear(attention, "qkv_proj")]
            num_queries = plain_linear(attention, "o_proj").in_features
        else:
            raise CantFuse(f"{type(attention).__name__} has {sorted(found)}")
        self.qkv = make_linear(ops, *parts)
        self.out = make_linear(ops, plain_linear(attention, "o_proj"))
        self.num_heads = num_queries // head_dim
        self.norms = norms
        self.options = options
        self.layer = layer
        self.rotation = rotation
        adopt(self, attention)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        batch: StepBatch,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert position_embeddings is not None
        return self.rows(hidden_states[0], position_embeddings, batch)[None], None

    def rows(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        batch: StepBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        backend: FusedAttentionBackend = batch.backend  # type: ignore[assignment]
        cos, sin = (self._angles(angles[0]) for angles in position_embeddings)
        query = backend.rope_and_write(
            self.layer, self.qkv(x), cos, sin, batch, self.num_heads, self.norms
        )
        attended = backend.attend(self.layer, query, batch, self.options)
        return self.out(attended.flatten(1), residual)

    def _angles(self, angles: Tensor) -> Tensor:
        if self.rotation is Rotation.REPEATED:
            return torch.cat([angles, angles], dim=-1)
        return angles[:, :0] if self.rotation is Rotation.NONE else angles


def head_norms(query: FusedNorm, key: FusedNorm, head_dim: int) -> HeadNorms:
    """For one pass over queries and keys; ``CantFuse`` where more than their weights differ."""
    if query.weight.shape != (head_dim,) or key.weight.shape != (head_dim,):
        raise CantFuse("q_norm or k_norm is not per head")
    if query.eps != key.eps or query.unit_offset != key.unit_offset:
        raise CantFuse("q_norm and k_norm are of different kinds")
    return HeadNorms(query.weight.detach(), key.weight.detach(), query.eps, query.unit_offset)


class FusedDecoderLayer(nn.Module):
    """A Llama-shaped layer of fused parts: h += attention(norm(h)); h += mlp(norm(h))."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        parts = {"input_layernorm": FusedNorm, "self_attn": FusedAttention}
        parts |= {"post_attention_layernorm": FusedNorm, "mlp": FusedMLP}
        if children(layer) != set(parts):
            raise CantFuse(f"{type(layer).__name__} has {sorted(children(layer))}")
        for name, kind in parts.items():
            if type(getattr(layer, name)) is not kind:
                raise CantFuse(f"{type(layer).__name__}.{name} is not fused")
        self.before_attention: FusedNorm = layer.input_layernorm  # type: ignore[assignment]
        self.attention: FusedAttention = layer.self_attn  # type: ignore[assignment]
        self.before_mlp: FusedNorm = layer.post_attention_layernorm  # type: ignore[assignment]
        self.mlp: FusedMLP = layer.mlp  # type: ignore[assignment]
        self.index = self.attention.layer
        self.returns_tuple = False
        adopt(self, layer)

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for layers that differ in nothing but their weights, windows and the like."""
        attention, mlp = self.attention, self.mlp
        norms = [(norm.eps, norm.unit_offset) for norm in (self.before_attention, self.before_mlp)]
        heads = attention.norms and (attention.norms.eps, attention.norms.unit_offset)
        return attention.num_heads, attention.rotation, heads, *norms, mlp.inner, mlp.activation

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor],
        batch: StepBatch,
        **_: Any,
    ) -> Tensor | tuple[Tensor]:
        h = hidden_states[0]
        h = self.attention.rows(
            self.before_attention.rows(h), position_embeddings, batch, residual=h
        )
        h = self.mlp.rows(self.before_mlp.rows(h), residual=h)[None]
        return (h,) if self.returns_tuple else h
