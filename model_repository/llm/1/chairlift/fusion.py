"""Puts fused modules in place of transformers' own wherever they agree numerically.

No list of models: of each decoder layer the norms, the attention and the MLP are tried one by one,
and the layer as a whole where all of them are fused. A candidate must take the module's shape and
then give the same output on random input, with random keys in the cache; whatever doesn't is left
alone and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import AttentionBackend, AttentionOptions, LayerShape, StepBatch
from .attention_torch import TorchAttention
from .fused_modules import (
    CantFuse,
    FusedAttention,
    FusedDecoderLayer,
    FusedMLP,
    FusedNorm,
    Rotation,
    adopt,
    head_norms,
)
from .fused_stack import stack_layers
from .fusion_trials import Run, Side, Trials, check_error, in_float32, worst_row
from .linears import LogitsHead, PackedLinear, packs

logger = logging.getLogger(__name__)


class FusionReport(NamedTuple):
    """Paths of what was replaced with what it became, and of what was left with the reason."""

    replaced: dict[str, str]
    left_alone: dict[str, str]

    @property
    def kinds(self) -> set[str]:
        return set(self.replaced.values())

    def summary(self) -> str:
        counts = {kind: list(self.replaced.values()).count(kind) for kind in sorted(self.kinds)}
        text = "fused " + (", ".join(f"{n} {kind}" for kind, n in counts.items()) or "nothing")
        if self.left_alone:
            reasons = sorted(set(self.left_alone.values()))
            text += f"; left {len(self.left_alone)} modules alone: {'; '.join(reasons)}"
        return text


def fuse(
    model: Any,
    ops: Any,
    make_backend: Callable[[], AttentionBackend],
    layers: Sequence[LayerShape],
    options: Sequence[AttentionOptions],
) -> FusionReport:
    """Replace in ``model`` what can be; ``make_backend`` gives the kernels' own backend."""
    report = FusionReport({}, {})
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    stack = getattr(decoder, "layers", None)
    if isinstance(stack, nn.ModuleList):
        trials = Trials(model, decoder, layers)
        fuser = _Fuser(ops, make_backend, options, trials, report)
        for index, layer in enumerate(stack):
            stack[index] = fuser.layer(f"layers.{index}", layer)
        stacked = stack_layers(ops, list(stack)) if _alike(stack, layers) else None
        if stacked is not None:
            adopt(stacked, stack[0])
            decoder.layers = nn.ModuleList([stacked])
            report.replaced["layers"] = "stack of layers"
        if isinstance(getattr(decoder, "norm", None), nn.Module):
            fuser.norm(decoder, "norm", "")
    else:
        report.left_alone["layers"] = f"{type(decoder).__name__} has no list of layers"
    _pack_leftovers(decoder, ops, report)
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and packs(ops, head.weight):
        model.set_output_embeddings(LogitsHead(ops, head))
        report.replaced["logits"] = "logits"
    return report


def _alike(stack: nn.ModuleList, layers: Sequence[LayerShape]) -> bool:
    """May one call run them all, with one cos and sin? (The kernel takes one shape for all.)"""
    forms = set()
    for index, layer in enumerate(stack):
        if not isinstance(layer, FusedDecoderLayer) or layer.index != index:
            return False
        if layer.attention.rotation is not Rotation.AS_GIVEN or layer.returns_tuple:
            return False
        forms.add((layer.form, layers[index], getattr(layer, "attention_type", None)))
    return len(forms) == 1


class _Fuser:
    """Replaces one module at a time, and books what became of it."""

    def __init__(
        self,
        ops: Any,
        make_backend: Callable[[], AttentionBackend],
        options: Sequence[AttentionOptions],
        trials: Trials,
        report: FusionReport,
    ) -> None:
        self._ops = ops
        self._make_backend = make_backend
        self._options = options
        self._trials = trials
        self._report = report

    def layer(self, path: str, layer: nn.Module) -> nn.Module:
        """``layer`` with fused parts, or what replaces it as a whole."""
        if hasattr(layer, "self_attn"):
            self._replace(layer, "self_attn", path, "attention", lambda: self._attention(layer))
        else:
            self._report.left_alone[path] = f"{type(layer).__name__} has no self_attn"
        for name, child in list(layer.named_children()):
            if type(child).__name__.endswith("MLP"):
                self._replace(layer, name, path, "MLP", partial(self._mlp, child))
            elif type(child).__name__.endswith("RMSNorm"):
                self.norm(layer, name, path)
        try:
            whole = self._whole(layer)
        except Exception as error:
            logger.debug("%s is fused in parts only: %s", path, error)
            return layer
        for part in [part for part in self._report.replaced if part.startswith(f"{path}.")]:
            del self._report.replaced[part]
        self._report.replaced[path] = "decoder layer"
        return whole

    def norm(self, parent: nn.Module, name: str, path: str) -> None:
        self._replace(parent, name, path, "norm", lambda: self._norm(getattr(parent, name)))

    def _replace(
        self, parent: nn.Module, name: str, path: str, kind: str, make: Callable[[], nn.Module]
    ) -> None:
        """Whatever goes wrong with the candidate, the original stays and serves."""
        path = f"{path}.{name}" if path else name
        try:
            setattr(parent, name, make())
        except Exception as error:
            cause = "" if isinstance(error, CantFuse) else f"{type(error).__name__}: "
            self._report.left_alone[path] = f"{cause}{error}"
        else:
            self._report.replaced[path] = kind

    def _norm(self, original: nn.Module) -> FusedNorm:
        """In the form that comes closer: Gemma's weights are so large that both come close."""
        with in_float32(original):
            forms = [FusedNorm(self._ops, original, unit_offset) for unit_offset in (False, True)]
            rows = self._trials.loud_rows(original, len(forms[0].weight))
            errors = [worst_row(original(rows), fused(rows)) for fused in forms]
        unit_offset = errors[1] < errors[0]
        check_error(min(errors), torch.float32, original)
        return FusedNorm(self._ops, original, unit_offset)

    def _mlp(self, original: nn.Module) -> FusedMLP:
        fused = FusedMLP(self._ops, original)
        rows = self._trials.loud_rows(original, self._trials.width)
        check_error(worst_row(original(rows), fused(rows)), rows.dtype, original)
        return fused

    def _attention(self, layer: nn.Module) -> FusedAttention:
        original: Any = layer.self_attn
        with in_float32(original):
            rotation = self._rotation(layer, original)
        return self._fused_attention(original, rotation)

    def _fused_attention(self, original: Any, rotation: Rotation) -> FusedAttention:
        norms = None
        if hasattr(original, "q_norm"):
            query, key = self._norm(original.q_norm), self._norm(original.k_norm)
            norms = head_norms(query, key, original.head_dim)
        options = self._options[original.layer_idx]
        return FusedAttention(self._ops, original, options, norms, rotation)

    def _rotation(self, layer: nn.Module, original: Any) -> Rotation:
        """With which the fused module gives the same; ``CantFuse`` if with none."""
        wanted = Side(self._attention_run(layer, original), TorchAttention)
        reasons: list[Exception] = []
        for rotation in Rotation:
            fused = self._fused_attention(original, rotation)
            got = Side(self._attention_run(layer, fused), self._make_backend)
            try:
                error = self._trials.attention_error(original.layer_idx, wanted, got, torch.float32)
                check_error(error, torch.float32, original)
            except Exception as reason:
                reasons.append(reason)
            else:
                return rotation
        raise reasons[0]

    def _attention_run(self, layer: nn.Module, attention: nn.Module) -> Run:
        def run(hidden: Tensor, batch: StepBatch) -> Tensor:
            out: Tensor = attention(
                hidden_states=hidden,
                position_embeddings=self._trials.position_embeddings(hidden, layer, batch),
                position_ids=batch.positions[None],
                attention_mask=None,
                batch=batch,
            )[0]
            return out

        return run

    def _whole(self, layer: nn.Module) -> FusedDecoderLayer:
        """Of fused parts, so that what's left to check is how the layer joins them."""
        whole = FusedDecoderLayer(layer)
        wanted = Side(self._layer_run(layer, layer, whole), self._make_backend)
        got = Side(self._layer_run(layer, whole, whole), self._make_backend)
        dtype = self._trials.dtype
        error = self._trials.attention_error(whole.index, wanted, got, dtype)
        check_error(error, dtype, layer)
        return whole

    def _layer_run(self, layer: nn.Module, called: nn.Module, whole: FusedDecoderLayer) -> Run:
        """Calls the one or the other; ``whole`` learns here in which form to return its output."""

        def run(hidden: Tensor, batch: StepBatch) -> Tensor:
            out = called(
                hidden,
                attention_mask=None,
                position_ids=batch.positions[None],
                position_embeddings=self._trials.position_embeddings(hidden, layer, batch),
                batch=batch,
            )
            whole.returns_tuple = not isinstance(out, Tensor)
            if isinstance(out, Tensor):
                return out
            if len(out) != 1:
                raise CantFuse(f"{type(layer).__name__} returns {len(out)} things")
            first: Tensor = out[0]
            return first

        return run


def _pack_leftovers(decoder: nn.Module, ops: Any, report: FusionReport) -> None:
    """Linear layers of modules that aren't fused: the kernels' are 1.5 times torch's in bf16."""
    for parent_path, parent in list(decoder.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and packs(ops, child.weight):
                setattr(parent, name, PackedLinear(ops, child))
                report.replaced[f"{parent_path}.{name}"] = "linear"
