"""Modules that do a transformers module's work in few kernels; fusion.py puts them in place.

Each raises ``CantFuse`` at construction where the module it should replace has another shape.
``x`` is [1, T, hidden] as transformers passes it; inside, the batch dimension is dropped.
"""

from __future__ import annotations

from typing import Any

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


def children(module: nn.Module, names: set[str], optional: frozenset[str] = frozenset()) -> None:
    """Raise ``CantFuse`` unless the module's children are ``names`` and at most ``optional``."""
    found = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    if not names <= found <= names | optional:
        raise CantFuse(f"{type(module).__name__} has {sorted(found)}")


def plain_linear(module: nn.Module, name: str) -> nn.Linear:
    linear = getattr(module, name)
    if type(linear) is not nn.Linear:
        raise CantFuse(f"{type(module).__name__}.{name} is a {type(linear).__name__}")
    return linear


class FusedNorm(nn.Module):
    """RMSNorm in the Llama form, or with ``unit_offset`` in Gemma's (1 + weight)."""

    def __init__(self, ops: Any, norm: nn.Module, unit_offset: bool) -> None:
        super().__init__()
        weight = getattr(norm, "weight", None)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if weight is None or eps is None or not type(norm).__name__.endswith("RMSNorm"):
            raise CantFuse(f"{type(norm).__name__} is no RMSNorm with weight and epsilon")
        self.weight = weight
        self.eps = float(eps)
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
        children(mlp, {"gate_proj", "up_proj", "down_proj"}, frozenset({"act_fn"}))
        gate, up = plain_linear(mlp, "gate_proj"), plain_linear(mlp, "up_proj")
        name = type(getattr(mlp, "act_fn", None)).__name__
        if name not in ACTIVATIONS or gate.bias is not None or up.bias is not None:
            raise CantFuse(f"{type(mlp).__name__} with activation {name}, or with biases")
        self._gated = make_gated(ops, gate, up, ACTIVATIONS[name])
        self._down = make_linear(ops, plain_linear(mlp, "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x[0])[None]

    def rows(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self._down(self._gated(x), residual)


class FusedAttention(nn.Module):
    """q-k-v as one matmul, then norm + rotary + KV write in one pass, attention, and o_proj."""

    def __init__(
        self, ops: Any, attention: nn.Module, layer: int, options: AttentionOptions, norm_form: bool
    ) -> None:
        super().__init__()
        names = {"q_proj", "k_proj", "v_proj", "o_proj"}
        children(attention, names, frozenset({"q_norm", "k_norm", "rotary_emb"}))
        head_dim = getattr(attention, "head_dim", None)
        projections = [plain_linear(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
        if not isinstance(head_dim, int) or projections[0].out_features % head_dim:
            raise CantFuse(f"{type(attention).__name__}: head_dim is {head_dim}")
        self._qkv = make_linear(ops, *projections)
        self._out = make_linear(ops, plain_linear(attention, "o_proj"))
        self._num_heads = projections[0].out_features // head_dim
        self._norms = _head_norms(ops, attention, head_dim, norm_form)
        self._layer = layer
        self._options = options

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
        cos, sin = position_embeddings
        query = backend.rope_and_write(
            self._layer, self._qkv(x), cos[0], sin[0], batch, self._num_heads, self._norms
        )
        attended = backend.attend(self._layer, query, batch, self._options)
        return self._out(attended.flatten(1), residual)


def _head_norms(
    ops: Any, attention: nn.Module, head_dim: int, unit_offset: bool
) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    query = FusedNorm(ops, attention.q_norm, unit_offset)
    key = FusedNorm(ops, attention.k_norm, unit_offset)
    if query.weight.shape != (head_dim,) or key.weight.shape != (head_dim,):
        raise CantFuse(f"{type(attention).__name__}: q_norm or k_norm is not per head")
    return HeadNorms(query.weight.detach(), key.weight.detach(), query.eps, unit_offset)


class FusedDecoderLayer(nn.Module):
    """A Llama-shaped layer: h += attention(norm(h)); h += mlp(norm(h)). Seven kernels."""

    def __init__(
        self, ops: Any, layer: nn.Module, index: int, options: AttentionOptions, norm_form: bool
    ) -> None:
        super().__init__()
        children(layer, {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
        self._attention = FusedAttention(ops, layer.self_attn, index, options, norm_form)
        self._mlp = FusedMLP(ops, layer.mlp)
        self._before_attention = FusedNorm(ops, layer.input_layernorm, norm_form)
        self._before_mlp = FusedNorm(ops, layer.post_attention_layernorm, norm_form)

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor],
        batch: StepBatch,
        **_: Any,
    ) -> Tensor:
        h = hidden_states[0]
        normed = self._before_attention.rows(h)
        h = self._attention.rows(normed, position_embeddings, batch, residual=h)
        return self._mlp.rows(self._before_mlp.rows(h), residual=h)[None]
