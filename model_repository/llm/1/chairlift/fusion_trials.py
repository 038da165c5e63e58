"""Runs a module and the one that should replace it on the same random input, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import AttentionBackend, LayerShape, StepBatch
from .fused_modules import CantFuse

BLOCK_SIZE = 16
CONTEXT, CHUNK = 19, 5
# Tokens that are alone in their sequence attend to themselves only, whatever their queries: these
# amplitudes show clamps on values and in MLPs, which random input of unit size never reaches.
AMPLITUDES = (1.0, 4.0, 30.0, 200.0)
# Root mean square error of a row over that of its signal. Two bf16 computations of an MLP differ by
# 3e-3 to 8e-3 on SmolLM2; a wrong rotation or norm shows as more than 1e-1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}

Run = Callable[[Tensor, StepBatch], Tensor]


class Side(NamedTuple):
    """A module under trial, called by ``run``, over a fresh cache of ``make_backend``."""

    run: Run
    make_backend: Callable[[], AttentionBackend]


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """Real weights on random input give attention scores of 100 and more: in bf16 such rows depend
    on rounding, so that only float32 tells whether two modules compute the same."""
    kept = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
    for tensor, data in kept:
        if data.is_floating_point():
            tensor.data = data.float()
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


class Trials:
    """Random input [1, T, hidden] of one model's width, always the same."""

    def __init__(self, model: Any, decoder: Any, layers: Sequence[LayerShape]) -> None:
        self._decoder = decoder
        self._layers = layers
        weight = model.get_input_embeddings().weight
        self.dtype, self._device = weight.dtype, weight.device
        self.width = int(decoder.config.hidden_size)
        # The farthest decode position: some models scale queries by their positions.
        self._far = int(getattr(decoder.config, "max_position_embeddings", None) or 4096) - 1
        self._generator = torch.Generator().manual_seed(0)

    def random(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device, dtype)

    def _loud(self, rows: Tensor) -> Tensor:
        """Rows [1, T, N] at one amplitude after the other."""
        amplitudes = torch.tensor(AMPLITUDES).repeat(rows.shape[1] // len(AMPLITUDES))
        return rows * amplitudes.to(rows)[None, :, None]

    def loud_rows(self, module: nn.Module, width: int) -> Tensor:
        """Input [1, 8, width] in the dtype of the module's weights, at several amplitudes."""
        dtype = next(module.parameters()).dtype
        return self._loud(self.random(dtype, 1, 2 * len(AMPLITUDES), width))

    def attention_error(
        self, layer: int, original: Side, candidate: Side, dtype: torch.dtype
    ) -> float:
        """The worst row's: a decode far into a context beside a chunk of a prompt, then tokens
        that are alone."""
        shape = self._layers[layer]
        hidden = self.random(dtype, 1, CHUNK + 1, self.width)
        alone = self._loud(self.random(dtype, 1, len(AMPLITUDES), self.width))
        keys = self.random(dtype, CONTEXT, shape.num_kv_heads, shape.key_dim)
        values = self.random(dtype, CONTEXT, shape.num_kv_heads, shape.value_dim)
        outputs: list[list[Tensor]] = []
        for side in (original, candidate):
            backend = side.make_backend()
            backend.allocate([shape] * (layer + 1), 6, BLOCK_SIZE, dtype, self._device)
            mixed = self._mixed_batch(backend)
            slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + CONTEXT, device=self._device)
            backend.write(layer, keys, values, mixed._replace(slot_mapping=slots))
            single = self._batch(backend, [[i] for i in range(len(AMPLITUDES))])
            outputs.append(
                [side.run(hidden.clone(), mixed), side.run(alone.clone(), single)],
            )
        return max(worst_row(*pair) for pair in zip(*outputs, strict=True))

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

    def _mixed_batch(self, backend: AttentionBackend) -> StepBatch:
        """A decode after ``CONTEXT`` keys in blocks 1, 2, and a chunk of a prompt in block 3."""
        batch = self._batch(backend, [[CONTEXT], list(range(CHUNK))])
        decode_slot = 2 * BLOCK_SIZE + CONTEXT - BLOCK_SIZE
        batch.slot_mapping[0] = decode_slot
        batch.slot_mapping[1:] += 2 * BLOCK_SIZE
        tables = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32, device=self._device)
        batch.positions[0] = max(self._far, CONTEXT)
        return batch._replace(block_tables=tables, max_seq_len=CONTEXT + 1)

    def _batch(self, backend: AttentionBackend, rows: list[list[int]]) -> StepBatch:
        """Sequences whose new tokens are at these positions, in a block each, from block 0 on."""

        def ints(values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row))
        positions = [position for row in rows for position in row]
        return StepBatch(
            input_ids=ints([0] * len(positions)),
            positions=ints(positions),
            slot_mapping=ints([i * BLOCK_SIZE + p for i, row in enumerate(rows) for p in row]),
            block_tables=ints([[i] for i in range(len(rows))], torch.int32),
            query_start=ints(starts, torch.int32),
            seq_lens=ints([row[-1] + 1 for row in rows], torch.int32),
            logit_rows=ints([0]),
            num_decodes=sum(len(row) == 1 for row in rows),
            max_query_len=max(len(row) for row in rows),
            max_seq_len=max(row[-1] + 1 for row in rows),
            backend=backend,
        )


def worst_row(wanted: Tensor, got: Tensor) -> float:
    """The largest error over signal of a row, so that big rows don't hide small ones."""
    if wanted.shape != got.shape:
        raise CantFuse(f"gives {tuple(wanted.shape)}, not {tuple(got.shape)}")
    error = (wanted.float() - got.float()).pow(2).mean(-1).sqrt()
    signal = wanted.float().pow(2).mean(-1).sqrt().clamp(min=1e-20)
    return float((error / signal).nan_to_num(float("inf")).max())


def check_error(error: float, dtype: torch.dtype, original: nn.Module) -> None:
    if error > TOLERANCE[dtype]:
        raise CantFuse(f"{type(original).__name__} differs by {error:.1e}")
