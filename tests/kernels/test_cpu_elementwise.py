"""Norms, gated activation and rotary embedding against float64, on every instruction path here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps, LayerShape
from chairlift_kernels.cpu.build import variants_here

TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=variants_here())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, roundings: int = 1) -> None:
    tolerance = TOLERANCE[actual.dtype] * roundings
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def norm(x: Tensor, weight: Tensor, unit_offset: bool) -> Tensor:
    rows = x.double()
    scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    return scaled * (weight.double() + unit_offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 576), (3, 37), (70, 576), (2, 4096)])
def test_rms_norm(
    ops: CpuOps, rows: int, width: int, unit_offset: bool, dtype: torch.dtype
) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    close(
        ops.rms_norm(x, weight, 1e-5, unit_offset=unit_offset),
        norm(x, weight, unit_offset),
    )
    stream = random(rows, width, dtype=dtype, seed=2)
    total = stream + x
    out = ops.rms_norm(x, weight, 1e-5, residual=stream, unit_offset=unit_offset)
    assert torch.equal(stream, total)
    close(out, norm(total, weight, unit_offset))


def test_llama_norm_rounds_before_the_weight(ops: CpuOps) -> None:
    x, weight = random(50, 96, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16, seed=1)
    rows = x.float()
    scaled = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    same = ops.rms_norm(x, weight, 1e-5) == scaled.bfloat16() * weight
    assert same.float().mean() > 0.99  # the sum of squares may differ in its last bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 1536), (5, 19), (40, 1536)])
def test_gated_activation(
    ops: CpuOps, rows: int, width: int, name: str, dtype: torch.dtype
) -> None:
    x = random(rows, 2 * width, dtype=dtype) * 4
    gate, up = x.double().split(width, -1)
    functions = torch.nn.functional
    expected = functions.silu(gate) if name == "silu" else functions.gelu(gate)
    if name == "gelu_tanh":
        expected = functions.gelu(gate, approximate="tanh")
    close(ops.gated_activation(x, name), expected * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_at_the_ends_of_the_range(ops: CpuOps, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e38, -1e4, -90.0, -1e-30, 0.0, 1e-30, 90.0, 1e4]], dtype=dtype)
    x = torch.cat([gate, torch.ones_like(gate)], -1)
    for name in ("silu", "gelu"):
        expected = getattr(torch.nn.functional, name)(gate.double())
        close(ops.gated_activation(x, name), expected)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rotate_half over the first R dimensions of [T, H, D] in float64."""
    turned = cos.shape[1]
    head, rest = x.double()[..., :turned], x.double()[..., turned:]
    first, second = head.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    return torch.cat([head * cos.double()[:, None] + half * sin.double()[:, None], rest], -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (80, 32), (96, 96), (40, 20), (256, 256)])
@pytest.mark.parametrize("norms", ["none", "llama", "gemma"])
def test_rope_and_cache(ops: CpuOps, dim: int, turned: int, norms: str, dtype: torch.dtype) -> None:
    tokens, heads, kv_heads = 21, 6, 2
    qkv = random(tokens, (heads + 2 * kv_heads) * dim + 5, dtype=dtype)[:, 5:]
    angle = random(tokens, turned, dtype=torch.float32, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    weights = [random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3)]
    roundings = {"none": 1, "gemma": 2, "llama": 3}[norms]  # as the models round between the steps
    q_norm, k_norm = weights if norms != "none" else (None, None)
    cache = ops.allocate_cache([LayerShape(kv_heads, dim, dim)], 3, dtype=dtype)
    slots = torch.randperm(48)[:tokens]
    slots[4] = -1
    out = ops.rope_and_cache(
        *(qkv, cos, sin, cache, 0, slots),
        num_heads=heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-5,
        unit_offset=norms == "gemma",
    )
    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = norm(q, q_norm, norms == "gemma"), norm(k, k_norm, norms == "gemma")
    close(out, rotated(q, cos, sin), roundings)
    blocks = [cache.read_block(0, block) for block in range(3)]
    kept = slots >= 0
    close(torch.cat([b.keys for b in blocks])[slots[kept]], rotated(k, cos, sin)[kept], roundings)
    assert torch.equal(torch.cat([b.values for b in blocks])[slots[kept]], v[kept])


def test_fp32_angles_with_bf16_heads(ops: CpuOps) -> None:
    qkv, angle = random(4, 3 * 64, dtype=torch.bfloat16), random(4, 64, dtype=torch.float32)
    cache = ops.allocate_cache([LayerShape(1, 64, 64)], 1)
    out = ops.rope_and_cache(qkv, angle.cos(), angle.sin(), cache, 0, torch.arange(4), num_heads=1)
    close(out, rotated(qkv[:, None, :64], angle.cos(), angle.sin()))
