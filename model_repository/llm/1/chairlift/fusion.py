"""Puts fused modules in place of transformers' own wherever they agree numerically.

No list of models: each decoder layer is tried as a whole, then its attention, MLP, and norms one by
one. A candidate must take the module's shape and then give the same output on random input, with
random keys in the cache; whatever doesn't is left alone and reported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import AttentionBackend, AttentionOptions, LayerShape, StepBatch
from .attention_torch import TorchAttention
from .fused_modules import CantFuse, FusedAttention, FusedDecoderLayer, FusedMLP, FusedNorm
from .linears import LogitsHead, packs

logger = logging.getLogger(__name__)

# Root mean square error of the candidate over that of the signal. Two bf16 computations of one layer
# differ by 3e-3 to 8e-3 on SmolLM2, a wrong rotation or norm by more than 1e-1.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
BLOCK_SIZE = 16
CHUNK, CONTEXT = 5, 19


class FusionReport(NamedTuple):
    """Names of what was replaced, and of what was left alone with the reason."""

    replaced: list[str]
    left_alone: dict[str, str]

    def summary(self) -> str:
        kinds = sorted({name.split(".")[-1] for name in self.replaced})
        text = f"fused {len(self.replaced)} modules"
        if self.left_alone:
            reasons = sorted(set(self.left_alone.values()))
            text += f"; left {len(self.left_alone)} alone: {'; '.join(reasons)}"
        return f"{text} ({', '.join(kinds)})" if kinds and kinds != [""] else text


class _Trial(NamedTuple):
    """A layer's random input: [1, T, hidden], and the positions' embeddings from the model."""

    hidden: Tensor
    keywords: dict[str, Any]
    backend: AttentionBackend


def fuse(
    model: Any,
    ops: Any,
    make_backend: Callable[[], AttentionBackend],
    layers: Sequence[LayerShape],
    options: Sequence[AttentionOptions],
) -> FusionReport:
    """Replace in ``model`` what can be; ``make_backend`` gives the kernels' own backend."""
    report = FusionReport([], {})
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    stack = getattr(decoder, "layers", None)
    if not isinstance(stack, nn.ModuleList):
        report.left_alone["layers"] = f"{type(decoder).__name__} has no list of layers"
        return report
    trials = _Trials(model, decoder, make_backend, layers)
    unit_offset = _uses_unit_offset(stack)
    for index, layer in enumerate(stack):
        _fuse_layer(ops, stack, index, layer, options[index], unit_offset, trials, report)
    final = getattr(decoder, "norm", None)
    if isinstance(final, nn.Module):
        _try_norm(ops, decoder, "norm", unit_offset, trials, report)
    _fuse_head(model, ops, report)
    return report


def _uses_unit_offset(stack: nn.ModuleList) -> bool:
    """Gemma's norms multiply by (1 + weight); a weight of zeros that changes nothing tells."""
    for module in stack[0].modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight"):
            width = module.weight.shape[0]
            x = torch.ones(1, width, dtype=module.weight.dtype, device=module.weight.device)
            kept = module.weight.data
            module.weight.data = torch.zeros_like(kept)
            nonzero = bool(module(x).abs().sum() > 0)
            module.weight.data = kept
            return nonzero
    return False


class _Trials:
    """Runs a module on random input against a cache with random contents."""

    def __init__(
        self,
        model: Any,
        decoder: Any,
        make_backend: Callable[[], AttentionBackend],
        layers: Sequence[LayerShape],
    ) -> None:
        self._model = model
        self._decoder = decoder
        self._make_backend = make_backend
        self._layers = layers
        weight = model.get_input_embeddings().weight
        self.dtype, self.device = weight.dtype, weight.device
        self._width = int(decoder.config.hidden_size)
        self._generator = torch.Generator().manual_seed(0)
        self.tolerance = TOLERANCE[self.dtype]

    def random(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self._generator)
        return values.to(self.device, self.dtype)

    def hidden(self) -> Tensor:
        return self.random(1, CHUNK + 1, self._width)

    def batch(self, backend: AttentionBackend) -> StepBatch:
        """A decode row at position ``CONTEXT`` in blocks 1, 2, and a chunk of a prompt in block 3."""
        device = self.device
        positions = [CONTEXT, *range(CHUNK)]
        slots = [
            2 * BLOCK_SIZE + CONTEXT - BLOCK_SIZE,
            *range(3 * BLOCK_SIZE, 3 * BLOCK_SIZE + CHUNK),
        ]

        def ints(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return StepBatch(
            input_ids=ints([0] * (CHUNK + 1), torch.int64),
            positions=ints(positions, torch.int64),
            slot_mapping=ints(slots, torch.int64),
            block_tables=ints([[1, 2], [3, 0]], torch.int32),
            query_start=ints([0, 1, CHUNK + 1], torch.int32),
            seq_lens=ints([CONTEXT + 1, CHUNK], torch.int32),
            logit_rows=ints([0], torch.int64),
            num_decodes=1,
            max_query_len=CHUNK,
            max_seq_len=CONTEXT + 1,
            backend=backend,
        )

    def attention_outputs(
        self, layer: int, run: Sequence[Callable[[Tensor, StepBatch], Tensor]]
    ) -> list[Tensor]:
        """The original over the reference cache, the candidate over the kernels', same contents."""
        hidden = self.hidden()
        shape = self._layers[layer]
        context = slice(BLOCK_SIZE, BLOCK_SIZE + CONTEXT)
        keys = self.random(CONTEXT, shape.num_kv_heads, shape.key_dim)
        values = self.random(CONTEXT, shape.num_kv_heads, shape.value_dim)
        outputs = []
        for backend, module in zip((TorchAttention(), self._make_backend()), run, strict=True):
            backend.allocate([shape] * (layer + 1), 4, BLOCK_SIZE, self.dtype, self.device)
            batch = self.batch(backend)
            slots = torch.arange(context.start, context.stop, device=self.device)
            backend.write(layer, keys, values, batch._replace(slot_mapping=slots))
            outputs.append(module(hidden, batch))
        return outputs

    def position_embeddings(self, hidden: Tensor, layer: nn.Module, batch: StepBatch) -> Any:
        """As the decoder makes them; some models have one rotary embedding per layer type."""
        rotary = getattr(self._decoder, "rotary_emb", None)
        if rotary is None:
            raise CantFuse(f"{type(self._decoder).__name__} has no rotary embedding")
        layer_type = getattr(layer, "attention_type", None) or getattr(
            getattr(layer, "self_attn", None), "layer_type", None
        )
        positions = batch.positions[None]
        if layer_type is not None and hasattr(rotary, "layer_types"):
            return rotary(hidden, positions, layer_type)
        return rotary(hidden, positions)

    def agree(self, reference: Tensor, candidate: Tensor) -> str | None:
        """None if they agree, else by how much they don't."""
        if reference.shape != candidate.shape:
            return f"shape {tuple(candidate.shape)} instead of {tuple(reference.shape)}"
        signal = reference.float().pow(2).mean().sqrt()
        error = (reference.float() - candidate.float()).pow(2).mean().sqrt()
        relative = float(error / signal) if signal > 0 else float(error)
        return None if relative <= self.tolerance else f"differs by {relative:.1e}"


def _fuse_layer(
    ops: Any,
    stack: nn.ModuleList,
    index: int,
    layer: nn.Module,
    options: AttentionOptions,
    unit_offset: bool,
    trials: _Trials,
    report: FusionReport,
) -> None:
    """The whole layer if it is Llama-shaped, else what can be of its parts."""
    try:
        whole = FusedDecoderLayer(ops, layer, index, options, unit_offset)
        _check_layer(trials, index, layer, whole)
    except CantFuse:
        pass
    else:
        stack[index] = whole
        report.replaced.append(f"layers.{index}.decoder layer")
        return
    _try_attention(ops, layer, index, options, unit_offset, trials, report)
    for name, child in list(layer.named_children()):
        if type(child).__name__.endswith("MLP"):
            _try_mlp(ops, layer, name, trials, report)
        elif type(child).__name__.endswith("RMSNorm"):
            _try_norm(ops, layer, name, unit_offset, trials, report)


def _check_layer(trials: _Trials, index: int, layer: nn.Module, whole: nn.Module) -> None:
    def run(module: nn.Module) -> Callable[[Tensor, StepBatch], Tensor]:
        def forward(hidden: Tensor, batch: StepBatch) -> Tensor:
            embeddings = trials.position_embeddings(hidden, layer, batch)
            out = module(
                hidden,
                attention_mask=None,
                position_ids=batch.positions[None],
                position_embeddings=embeddings,
                batch=batch,
            )
            if not isinstance(out, Tensor):
                raise CantFuse(f"{type(layer).__name__} returns a {type(out).__name__}")
            return out

        return forward

    reference, candidate = trials.attention_outputs(index, [run(layer), run(whole)])
    difference = trials.agree(reference, candidate)
    if difference:
        raise CantFuse(f"{type(layer).__name__} {difference}")


def _try_attention(
    ops: Any,
    layer: nn.Module,
    index: int,
    options: AttentionOptions,
    unit_offset: bool,
    trials: _Trials,
    report: FusionReport,
) -> None:
    original = getattr(layer, "self_attn", None)
    name = f"layers.{index}.attention"
    if not isinstance(original, nn.Module):
        report.left_alone[name] = f"{type(layer).__name__} has no self_attn"
        return

    def run(module: nn.Module) -> Callable[[Tensor, StepBatch], Tensor]:
        def forward(hidden: Tensor, batch: StepBatch) -> Tensor:
            embeddings = trials.position_embeddings(hidden, layer, batch)
            out: Tensor = module(
                hidden_states=hidden,
                position_embeddings=embeddings,
                attention_mask=None,
                batch=batch,
            )[0]
            return out

        return forward

    try:
        fused = FusedAttention(ops, original, index, options, unit_offset)
        reference, candidate = trials.attention_outputs(index, [run(original), run(fused)])
        difference = trials.agree(reference, candidate)
        if difference:
            raise CantFuse(f"{type(original).__name__} {difference}")
    except (CantFuse, TypeError, ValueError) as error:
        report.left_alone[name] = str(error)
        return
    layer.self_attn = fused
    report.replaced.append(name)


def _try_mlp(ops: Any, parent: nn.Module, name: str, trials: _Trials, report: FusionReport) -> None:
    original = getattr(parent, name)
    _try_simple(parent, name, lambda: FusedMLP(ops, original), trials, report)


def _try_norm(
    ops: Any,
    parent: nn.Module,
    name: str,
    unit_offset: bool,
    trials: _Trials,
    report: FusionReport,
) -> None:
    original = getattr(parent, name)
    _try_simple(parent, name, lambda: FusedNorm(ops, original, unit_offset), trials, report)


def _try_simple(
    parent: nn.Module,
    name: str,
    make: Callable[[], nn.Module],
    trials: _Trials,
    report: FusionReport,
) -> None:
    """A module of one tensor: the same random rows through both."""
    original = getattr(parent, name)
    hidden = trials.hidden()
    try:
        fused = make()
        difference = trials.agree(original(hidden), fused(hidden))
        if difference:
            raise CantFuse(f"{type(original).__name__} {difference}")
    except (CantFuse, ValueError, RuntimeError) as error:
        report.left_alone[f"{type(parent).__name__}.{name}"] = str(error)
        return
    setattr(parent, name, fused)
    report.replaced.append(name)


def _fuse_head(model: Any, ops: Any, report: FusionReport) -> None:
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and packs(ops, head.weight):
        model.set_output_embeddings(LogitsHead(ops, head))
        report.replaced.append("logits")
