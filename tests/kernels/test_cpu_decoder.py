"""The decoder stack in one call computes, bit for bit, what its operators compute one by one."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps
from chairlift_kernels.cpu.decoder import LayerWeights, Normalisation

HIDDEN, HEADS, KV_HEADS, DIM, INNER, LAYERS = 96, 6, 2, 32, 160, 3
BLOCK_SIZE, NUM_BLOCKS = 16, 12
NORMS = Normalisation(1e-5, 1e-6, False)


def make_layer(ops: CpuOps, seed: int, head_norms: bool) -> LayerWeights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.1) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    return LayerWeights(
        attention_norm=random(HIDDEN, scale=1.0),
        qkv=ops.pack_linear(random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), random(320, scale=1.0)),
        q_norm=random(DIM, scale=1.0) if head_norms else None,
        k_norm=random(DIM, scale=1.0) if head_norms else None,
        out=ops.pack_linear(random(HIDDEN, HEADS * DIM)),
        mlp_norm=random(HIDDEN, scale=1.0),
        gate_up=ops.pack_gate_up(random(INNER, HIDDEN), random(INNER, HIDDEN)),
        down=ops.pack_linear(random(HIDDEN, INNER)),
        scale=DIM**-0.5,
        window=7 if seed == 1 else None,
        softcap=None,
        sinks=None,
    )


def one_by_one(
    ops: CpuOps,
    layers: list[LayerWeights],
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    rest: dict[str, Any],
) -> Tensor:
    for index, layer in enumerate(layers):
        normed = ops.rms_norm(h, layer.attention_norm, NORMS.eps)
        query = ops.rope_and_cache(
            ops.linear(normed, layer.qkv),
            *(cos, sin, rest["cache"], index, rest["slots"]),
            num_heads=HEADS,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=NORMS.head_eps,
        )
        attended = ops.attend(
            *(query, rest["cache"], index, rest["tables"], rest["starts"], rest["lengths"]),
            scale=layer.scale,
            window=layer.window,
        )
        h = ops.linear(attended.flatten(1), layer.out, residual=h)
        gated = ops.gate_up(ops.rms_norm(h, layer.mlp_norm, NORMS.eps), layer.gate_up, "silu")
        h = ops.linear(gated, layer.down, residual=h)
    return h


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [1, 33], [5, 40, 2]])
def test_stack_equals_its_operators(counts: list[int], head_norms: bool) -> None:
    """Rows of ``counts`` new tokens, each in blocks of its own; two steps over the same cache."""
    ops = CpuOps()
    layers = [make_layer(ops, seed, head_norms) for seed in range(LAYERS)]
    decoder = ops.pack_decoder(layers, HEADS, "silu", NORMS)
    shapes = [(KV_HEADS, DIM, DIM)] * LAYERS
    generator = torch.Generator().manual_seed(9)
    tokens = sum(counts)
    hidden = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    angles = torch.rand(tokens, DIM // 2, generator=generator).repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    tables = torch.arange(1, 1 + 3 * len(counts), dtype=torch.int32).view(len(counts), 3)
    slots = torch.tensor(
        [int(tables[r, i // 16]) * 16 + i % 16 for r, n in enumerate(counts) for i in range(n)]
    )
    results = []
    for whole in (True, False):
        cache = ops.allocate_cache(shapes, NUM_BLOCKS, BLOCK_SIZE, torch.bfloat16)
        rest = {
            "cache": cache,
            "slots": slots,
            "tables": tables,
            "starts": torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
            "lengths": torch.tensor(counts, dtype=torch.int32),
        }
        if whole:
            h = hidden.clone()
            decoder.run(h, cos, sin, **rest)
        else:
            h = one_by_one(ops, layers, hidden, cos, sin, rest)
        results.append((h, cache.read_block(LAYERS - 1, 1)))
    (h, block), (expected, expected_block) = results
    assert torch.equal(h, expected)
    used = min(counts[0], 16)
    assert torch.equal(block.keys[:used], expected_block.keys[:used])
    assert torch.equal(block.values[:used], expected_block.values[:used])
    assert expected.float().std() > 0.1
