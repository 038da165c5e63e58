"""All decoder layers as one: a single kernel call per step instead of seven per layer.

Only where every layer was fused whole, over weights that the CPU's kernels hold packed. The same
operators run in the same order, so the result is the same to the last bit; what is saved is the
interpreter: about 200 calls a step, each of which hands its lock to whichever thread wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from chairlift_kernels.cpu.decoder import LayerWeights, Normalisation, PackedDecoder

from .attention import StepBatch
from .attention_kernels import KernelAttention
from .fused_modules import FusedDecoderLayer
from .linears import KernelGated, KernelLinear


class FusedStack(nn.Module):
    """Stands in the model's list of layers as its only one."""

    def __init__(self, decoder: PackedDecoder) -> None:
        super().__init__()
        self._decoder = decoder

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor],
        batch: StepBatch,
        **_: Any,
    ) -> Tensor:
        cos, sin = position_embeddings
        hidden = hidden_states[0].contiguous()
        self.run(hidden, cos[0], sin[0], batch)
        return hidden[None]

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch) -> None:
        """Change hidden [T, H] in place; cos and sin are [T, R]."""
        backend = batch.backend
        assert isinstance(backend, KernelAttention)
        self._decoder.run(
            hidden,
            cos,
            sin,
            backend.cache,
            batch.slot_mapping,
            batch.block_tables,
            batch.query_start,
            batch.seq_lens,
        )


def stack_layers(ops: Any, layers: Sequence[nn.Module]) -> FusedStack | None:
    """The layers as one module, or None where the kernels can't run them so."""
    if not hasattr(ops, "pack_decoder"):
        return None
    weights = []
    for layer in layers:
        if not isinstance(layer, FusedDecoderLayer):
            return None
        packed = _weights(layer)
        if packed is None:
            return None
        weights.append(packed)
    first = layers[0]
    assert isinstance(first, FusedDecoderLayer)
    gated = first.mlp.gated
    assert isinstance(gated, KernelGated)
    heads = first.attention.norms
    norms = Normalisation(
        first.before_attention.eps,
        heads.eps if heads is not None else first.before_attention.eps,
        first.before_attention.unit_offset,
    )
    return FusedStack(ops.pack_decoder(weights, first.attention.num_heads, gated.activation, norms))


def _weights(layer: FusedDecoderLayer) -> LayerWeights | None:
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.down)
    if not isinstance(mlp.gated, KernelGated):
        return None
    packed = [linear.packed for linear in linears if isinstance(linear, KernelLinear)]
    if len(packed) < len(linears):
        return None
    qkv, out, down = packed
    options, norms = attention.options, attention.norms
    return LayerWeights(
        attention_norm=layer.before_attention.weight.detach(),
        qkv=qkv,
        q_norm=None if norms is None else norms.query,
        k_norm=None if norms is None else norms.key,
        out=out,
        mlp_norm=layer.before_mlp.weight.detach(),
        gate_up=mlp.gated.packed,
        down=down,
        scale=options.scale,
        window=options.window,
        softcap=options.softcap,
        sinks=None if options.sinks is None else options.sinks.detach().float().contiguous(),
    )
