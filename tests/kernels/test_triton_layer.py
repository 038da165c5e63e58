"""Norm, activation, rotation and cache kernels against float64."""

from __future__ import annotations

import pytest
import torch

from chairlift_kernels import reference
from chairlift_kernels.kv_cache import FP8, KvCache, bytes_per_block, independent_waves
from chairlift_kernels.ops import TritonOps
from tests.kernels.paged_batch import assert_close


@pytest.fixture(scope="module")
def ops(device: torch.device) -> TritonOps:
    return TritonOps(device)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 576), (17, 96), (2, 2304)])
def test_rms_norm(
    ops: TritonOps, rows: int, size: int, unit_offset: bool, triton_dtype: torch.dtype
) -> None:
    x = random(rows, size, dtype=triton_dtype, device=ops.device)
    weight = random(size, dtype=triton_dtype, device=ops.device)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-6, unit_offset=unit_offset)
    out = ops.rms_norm(x, weight, 1e-6, unit_offset=unit_offset)
    assert_close(out, expected, triton_dtype)


def test_rms_norm_adds_to_the_residual_in_place(ops: TritonOps, triton_dtype: torch.dtype) -> None:
    x = random(5, 96, dtype=triton_dtype, device=ops.device)
    residual = random(5, 96, dtype=triton_dtype, device=ops.device).flip(0)
    weight = random(96, dtype=triton_dtype, device=ops.device)
    total = x + residual
    out = ops.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(residual, total)
    assert_close(out, reference.rms_norm(total.double(), weight.double(), 1e-5), triton_dtype)


def test_rms_norm_of_heads_and_of_strided_rows(ops: TritonOps) -> None:
    wide = random(4, 3, 128, dtype=torch.float32, device=ops.device)
    weight = random(64, dtype=torch.float32, device=ops.device)
    for x in (wide[..., :64], wide[:, 1, 64:], wide[:0, 0, :64]):
        out = ops.rms_norm(x, weight, 1e-6)
        expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
        assert_close(out, expected, torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 1536), (17, 100)])
def test_gated_activation(
    ops: TritonOps, rows: int, size: int, activation: str, triton_dtype: torch.dtype
) -> None:
    gate_up = 3 * random(rows, 2 * size, dtype=triton_dtype, device=ops.device)
    gate_up[0, :4] = torch.tensor([-80.0, 80.0, 0.0, -0.5])
    out = ops.gated_activation(gate_up, activation)
    expected = reference.gated_activation(gate_up.double(), activation)
    assert_close(out, expected, triton_dtype)


def test_an_unknown_activation_is_refused(ops: TritonOps) -> None:
    with pytest.raises(ValueError, match="relu"):
        ops.gated_activation(torch.zeros(1, 4), "relu")


def angles(tokens: int, turned: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [tokens, turned] as models make them, the two halves alike."""
    speed = 10_000.0 ** (-torch.arange(0, turned, 2) / turned)
    phase = (torch.arange(tokens)[:, None] * 7.0 * speed).repeat(1, 2)
    return phase.cos().to(like), phase.sin().to(like)


def normed(x: torch.Tensor, weight: torch.Tensor | None, unit_offset: bool) -> torch.Tensor:
    x = x.double()
    if weight is None:
        return x
    return reference.rms_norm(x, weight.double(), 1e-6, unit_offset=unit_offset)


@pytest.mark.parametrize("norm", ["none", "llama", "gemma"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "turned"),
    [(4, 2, 64, 64), (7, 1, 80, 32), (9, 3, 96, 96), (14, 2, 128, 128), (2, 2, 48, 24)],
)
def test_rope_and_cache(
    ops: TritonOps, heads: int, kv_heads: int, size: int, turned: int, norm: str,
    triton_dtype: torch.dtype,
) -> None:  # fmt: skip
    tokens, block_size = 5, 4
    cache = ops.allocate_cache([(kv_heads, size, size)], 6, block_size, triton_dtype)
    for part in cache.layers[0][:2]:
        part.fill_(float("nan"))
    width = (heads + 2 * kv_heads) * size
    qkv = random(tokens, width, dtype=triton_dtype, device=ops.device)
    weights = [None, None]
    if norm != "none":
        weights = [random(2, size, dtype=triton_dtype, device=ops.device)[i] for i in (0, 1)]
    cos, sin = angles(tokens, turned, qkv)
    slots = torch.tensor([3, 4, -1, 23, 0], device=ops.device)
    out = ops.rope_and_cache(
        qkv, cos, sin, cache, 0, slots, num_heads=heads, q_norm=weights[0], k_norm=weights[1],
        eps=1e-6, unit_offset=norm == "gemma",
    )  # fmt: skip
    parts = qkv.view(tokens, -1, size).split((heads, kv_heads, kv_heads), dim=1)
    q, k = (
        reference.rotate(normed(x, w, norm == "gemma"), cos.double(), sin.double())
        for x, w in zip(parts[:2], weights, strict=True)
    )
    assert_close(out, q, triton_dtype)
    written = torch.full((6, block_size, kv_heads, size), float("nan"), dtype=torch.double)
    for actual, expected in zip(cache.layers[0][:2], (k, parts[2].double()), strict=True):
        target = written.to(ops.device).clone()
        reference.write_slots(target, expected, slots)
        assert torch.equal(actual.isnan(), target.isnan())
        assert_close(actual.nan_to_num(), target.nan_to_num(), triton_dtype)


def test_rope_and_cache_of_values_narrower_than_keys(ops: TritonOps) -> None:
    cache = ops.allocate_cache([(2, 64, 32)], 2, 16, torch.float32)
    qkv = random(3, 6 * 64 + 2 * 32, dtype=torch.float32, device=ops.device)
    cos, sin = angles(3, 64, qkv)
    slots = torch.tensor([1, 2, 30], device=ops.device)
    ops.rope_and_cache(qkv, cos, sin, cache, 0, slots, num_heads=4)
    values = cache.layers[0].values.view(32, 2, 32)[slots]
    assert torch.equal(values, qkv[:, 6 * 64 :].view(3, 2, 32))


def test_rope_and_cache_wants_both_norms_or_none(ops: TritonOps) -> None:
    cache = ops.allocate_cache([(1, 64, 64)], 2, 16, torch.float32)
    qkv = torch.zeros(1, 192)
    with pytest.raises(ValueError, match="together"):
        ops.rope_and_cache(
            qkv, qkv[:, :64], qkv[:, :64], cache, 0, torch.tensor([0]), num_heads=1,
            q_norm=torch.ones(64),
        )  # fmt: skip


def filled_cache(ops: TritonOps, dtype: torch.dtype) -> KvCache:
    """Three layers, two of one shape, every entry known."""
    shapes = [(2, 64, 64), (1, 48, 32), (2, 64, 64)]
    cache = ops.allocate_cache(shapes, 5, 4, dtype)
    for layer, (heads, key_dim, value_dim) in enumerate(shapes):
        x = random(20, heads, key_dim + value_dim, dtype=torch.float32, device=ops.device) + layer
        keys, values = x.split((key_dim, value_dim), dim=-1)
        cache.write(layer, keys, values, torch.arange(20, device=ops.device))
    return cache


def test_write_skips_slots_of_minus_one(ops: TritonOps, triton_dtype: torch.dtype) -> None:
    cache = filled_cache(ops, triton_dtype)
    before = cache.layers[1].keys.clone()
    new = random(3, 1, 48, dtype=triton_dtype, device=ops.device)
    cache.write(1, new, new[..., :32], torch.tensor([-1, 7, -1], device=ops.device))
    reference.write_slots(before, new, torch.tensor([-1, 7, -1], device=ops.device))
    assert torch.equal(cache.layers[1].keys, before)
    contents = cache.read_block(1, 1)
    assert torch.equal(contents.keys[3], new[1])
    assert torch.equal(contents.values[3], new[1, :, :32])


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_copies_follow_one_another_in_every_layer(ops: TritonOps, dtype: torch.dtype) -> None:
    """Block 2 gets what block 0 got from block 4; block 4 keeps its own."""
    fp8_ops = TritonOps(ops.device, capability=max(ops.capability, (9, 0)))
    if ops.device.type == "cuda" and ops.capability < (8, 9):
        fp8_ops = ops
        dtype = torch.float32
    cache = filled_cache(fp8_ops, dtype)
    before = [[cache.read_block(layer, b) for b in range(5)] for layer in range(3)]
    cache.copy_blocks([(4, 0), (0, 2), (3, 1)])
    for layer in range(3):
        for block, source in enumerate((4, 3, 4, 3, 4)):
            for now, then in zip(
                cache.read_block(layer, block), before[layer][source], strict=True
            ):
                assert torch.equal(now, then)


def test_copies_are_cut_where_one_needs_another() -> None:
    assert independent_waves([]) == []
    assert independent_waves([(0, 1), (0, 2), (3, 4)]) == [[(0, 1), (0, 2), (3, 4)]]
    assert independent_waves([(0, 1), (1, 2)]) == [[(0, 1)], [(1, 2)]]
    assert independent_waves([(0, 1), (2, 0)]) == [[(0, 1)], [(2, 0)]]
    assert independent_waves([(0, 1), (2, 1)]) == [[(0, 1)], [(2, 1)]]


def test_copies_outside_the_cache_are_refused(ops: TritonOps) -> None:
    cache = ops.allocate_cache([(1, 64, 64)], 2, 4, torch.float32)
    with pytest.raises(IndexError, match="0..1"):
        cache.copy_blocks([(0, 2)])


def test_e4m3_entries_are_scaled_rounded_and_clamped(ops: TritonOps) -> None:
    """In the interpreter only values that need no rounding: its own loses carries (7.8 -> 4)."""
    if ops.device.type == "cuda" and ops.capability < (8, 9):
        pytest.skip("e4m3 needs sm_89")
    ops = TritonOps(ops.device, capability=max(ops.capability, (9, 0)))
    scale = torch.tensor([0.5, 2.0], device=ops.device)
    cache = ops.allocate_cache([(2, 64, 64)], 2, 16, FP8, [(scale, scale)])
    x = 30 * random(3, 2, 64, dtype=torch.float32, device=ops.device)
    if ops.device.type == "cpu":
        x = (x / scale[:, None]).to(FP8).float() * scale[:, None]
    x[0, 0, 0], x[0, 1, 0] = 30_000.0, -30_000.0
    slots = torch.tensor([0, 17, -1], device=ops.device)
    cache.write(0, x, x, slots)
    expected = (x / scale[:, None]).clamp(-448, 448).to(FP8).float()
    for part in cache.layers[0][:2]:
        stored = part.view(torch.uint8).view(FP8).view(32, 2, 64).float()
        assert torch.equal(stored[slots[:2]], expected[:2])


def test_bytes_of_a_block(ops: TritonOps) -> None:
    shapes = [(2, 64, 64), (1, 48, 32)]
    cache = ops.allocate_cache(shapes, 3, 16, torch.float16)
    held = sum(part.nbytes for layer in cache.layers for part in layer[:2])
    assert held == 3 * bytes_per_block(shapes, 16, torch.float16)
