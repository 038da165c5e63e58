"""Paged attention and its cache against float64, on every instruction path this machine can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps, KvCache, LayerShape, bytes_per_block
from chairlift_kernels.cpu.build import variants_here

TOLERANCE = {torch.bfloat16: 1.5e-2, torch.float32: 2e-5}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(scope="module", params=variants_here())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


class Batch(NamedTuple):
    """What attend() takes, beside the keys and values of each sequence in plain order."""

    q: Tensor
    cache: KvCache
    tables: Tensor
    starts: Tensor
    lengths: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def build(
    ops: CpuOps,
    sequences: Sequence[tuple[int, int]],
    heads: int,
    shape: LayerShape,
    dtype: torch.dtype,
    block_size: int = 16,
) -> Batch:
    """A batch over shuffled blocks of a cache full of NaN but for the keys and values it owns."""
    generator = torch.Generator().manual_seed(len(sequences) + heads)
    counts = [-(-total // block_size) for _, total in sequences]
    cache = ops.allocate_cache([shape, shape], sum(counts) + 3, block_size, dtype)
    for layer in cache.layers:
        layer.fill_(float("nan"))
    blocks = torch.randperm(cache.num_blocks, generator=generator)[: sum(counts)]
    tables = torch.full((len(sequences), max(counts, default=0) + 1), -1, dtype=torch.int32)
    keys, values = [], []
    for row, own in enumerate(blocks.split(counts)):
        total = sequences[row][1]
        tables[row, : len(own)] = own
        keys.append(torch.randn(total, shape.heads, shape.key_dim, generator=generator).to(dtype))
        values.append(
            torch.randn(total, shape.heads, shape.value_dim, generator=generator).to(dtype)
        )
        place = torch.arange(total)
        slots = own[place // block_size] * block_size + place % block_size
        cache.write(1, keys[-1], values[-1], slots)
    new = torch.tensor([0, *(count for count, _ in sequences)])
    q = torch.randn(int(new.sum()), heads, shape.key_dim, generator=generator).to(dtype)
    lengths = torch.tensor([total for _, total in sequences], dtype=torch.int32)
    return Batch(q, cache, tables, new.cumsum(0).int(), lengths, keys, values)


def reference(
    batch: Batch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(q k scale) + mask) v per sequence in float64."""
    outputs = []
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        q = batch.q[batch.starts[row] : batch.starts[row + 1]].double()
        group = q.shape[1] // keys.shape[1]
        k = keys.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        place = torch.arange(len(keys))
        behind = place[len(keys) - len(q) :, None] - place
        hidden = (behind < 0) | (behind >= (window or len(keys) + 1))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        v = values.double().repeat_interleave(group, 1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


MIXED = [(1, 1), (1, 40), (7, 7), (33, 33), (1, 129), (5, 700), (0, 20), (1, 16), (64, 600)]


def check(ops: CpuOps, batch: Batch, scale: float, **options: object) -> Tensor:
    out = ops.attend(
        batch.q, batch.cache, 1, batch.tables, batch.starts, batch.lengths, scale=scale, **options
    )
    expected = reference(batch, scale, **options)
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (7, 1), (4, 4), (14, 2), (8, 1), (71, 1)])
def test_mixed_batch_with_any_head_ratio(
    ops: CpuOps, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    batch = build(ops, MIXED, heads, LayerShape(kv_heads, 64, 64), dtype)
    check(ops, batch, 0.125)


DECODING = [(1, n) for n in (1, 5, 15, 16, 17, 33, 40, 64, 127, 128, 129, 300, 511, 513, 700, 1100)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (24, 24), (34, 2)])
def test_kv_heads_together_give_what_each_gives(
    ops: CpuOps, heads: int, kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    """Many decoding sequences put several KV heads into one work item, a few sequences do not."""
    batch = build(ops, [*DECODING, (40, 90)], heads, LayerShape(kv_heads, 64, 64), dtype)
    together = check(ops, batch, 0.125, window=window)
    for row in range(len(DECODING)):
        alone = ops.attend(
            *(batch.q[row : row + 1], batch.cache, 1, batch.tables[row : row + 1]),
            *(batch.starts[:2], batch.lengths[row : row + 1]),
            scale=0.125,
            window=window,
        )
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 48, 64, 80, 96, 112, 128, 256])
def test_any_head_dimension(ops: CpuOps, dim: int, dtype: torch.dtype) -> None:
    batch = build(ops, [(1, 77), (40, 150)], 4, LayerShape(2, dim, dim), dtype)
    check(ops, batch, dim**-0.5)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes_and_unequal_key_and_value_dimensions(ops: CpuOps, block_size: int) -> None:
    shape = LayerShape(2, 96, 40)
    batch = build(ops, [(1, 300), (20, 90)], 6, shape, torch.bfloat16, block_size)
    check(ops, batch, 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 128, 512, 513, 5000])
def test_windows_on_and_off_block_edges(ops: CpuOps, window: int, dtype: torch.dtype) -> None:
    batch = build(ops, MIXED, 6, LayerShape(2, 64, 64), dtype)
    check(ops, batch, 0.125, window=window)


def test_blocks_behind_the_window_are_not_read(ops: CpuOps) -> None:
    batch = build(ops, [(1, 700), (4, 300)], 6, LayerShape(2, 64, 64), torch.bfloat16)
    whole = check(ops, batch, 0.125, window=40)
    batch.tables[0, : (700 - 40) // 16] = -(2**30)
    batch.tables[1, : (300 - 4 - 40) // 16] = -(2**30)
    assert torch.equal(check(ops, batch, 0.125, window=40), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_and_sinks(ops: CpuOps, dtype: torch.dtype) -> None:
    batch = build(ops, MIXED, 6, LayerShape(2, 64, 64), dtype)
    check(ops, batch, 0.5, softcap=3.0)
    check(ops, batch, 0.125, sinks=torch.linspace(-3, 6, 6))
    check(ops, batch, 0.125, sinks=torch.linspace(-3, 6, 6), window=20, softcap=5.0)


def test_large_scores_keep_the_softmax_finite(ops: CpuOps) -> None:
    batch = build(ops, MIXED, 6, LayerShape(2, 64, 64), torch.float32)
    batch.q.mul_(200)  # scores of thousands: their own rounding is up to 1e-3 of an exponent
    out = ops.attend(batch.q, batch.cache, 1, batch.tables, batch.starts, batch.lengths, scale=1.0)
    torch.testing.assert_close(out.double(), reference(batch, 1.0), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_is_the_same_bits_in_any_batch_chunk_and_split(
    ops: CpuOps, dtype: torch.dtype, window: int | None
) -> None:
    shape = LayerShape(2, 64, 64)
    batch = build(ops, [(1100, 1100)], 6, shape, dtype, block_size=32)
    whole = check(ops, batch, 0.125, window=window)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # one row of several segments: they are shared out and merged
    try:
        for new, total in [(1, 1100), (1, 513), (100, 900), (17, 1024)]:
            part = ops.attend(
                batch.q[total - new : total],
                batch.cache,
                1,
                batch.tables,
                torch.tensor([0, new], dtype=torch.int32),
                torch.tensor([total], dtype=torch.int32),
                scale=0.125,
                window=window,
            )
            assert torch.equal(part, whole[total - new : total])
    finally:
        torch.set_num_threads(threads)


def test_strided_queries_and_given_output(ops: CpuOps) -> None:
    batch = build(ops, MIXED, 6, LayerShape(2, 64, 64), torch.bfloat16)
    plain = check(ops, batch, 0.125)
    head_major = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.full((len(batch.q), 2, 6, 64), 7.0, dtype=torch.bfloat16)
    result = ops.attend(
        *(head_major, batch.cache, 1, batch.tables, batch.starts, batch.lengths),
        scale=0.125,
        out=out[:, 1],
    )
    assert result.data_ptr() == out[:, 1].data_ptr()
    assert torch.equal(out[:, 1], plain)
    assert torch.equal(out[:, 0], torch.full_like(plain, 7.0))


def test_an_empty_batch_is_an_empty_result(ops: CpuOps) -> None:
    batch = build(ops, [(0, 5)], 6, LayerShape(2, 64, 64), torch.bfloat16)
    assert check(ops, batch, 0.125).shape == (0, 6, 64)


def test_a_cache_of_many_large_pages_keeps_its_first_and_last_block(ops: CpuOps) -> None:
    """Large enough for pages to be tried, whether they turn out quick or slow."""
    cache = ops.allocate_cache([LayerShape(8, 64, 64)], 1200, 32)  # 79 MB
    keys, values = torch.randn(2, 2, 8, 64).bfloat16()
    cache.write(0, keys, values, torch.tensor([0, 1200 * 32 - 1]))
    for row, (block, place) in enumerate([(0, 0), (1199, 31)]):
        contents = cache.read_block(0, block)
        assert torch.equal(contents.keys[place], keys[row])
        assert torch.equal(contents.values[place], values[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 40, 64, 80])
def test_cache_gives_back_what_was_written(ops: CpuOps, dim: int, dtype: torch.dtype) -> None:
    shape = LayerShape(3, dim, dim + 8)
    cache = ops.allocate_cache([shape], 4, 32, dtype)
    cache.layers[0].zero_()
    wide = torch.randn(70, 3, 2 * dim + 16).to(dtype)
    keys, values = wide[..., :dim], wide[..., dim : 2 * dim + 8]
    slots = torch.randperm(4 * 32)[:70]
    slots[11] = -1
    cache.write(0, keys, values, slots)
    expected_keys = torch.zeros(128, 3, dim, dtype=dtype)
    expected_values = torch.zeros(128, 3, dim + 8, dtype=dtype)
    kept = slots >= 0
    expected_keys[slots[kept]], expected_values[slots[kept]] = keys[kept], values[kept]
    for block in range(4):
        contents = cache.read_block(0, block)
        assert torch.equal(contents.keys, expected_keys[block * 32 : block * 32 + 32])
        assert torch.equal(contents.values, expected_values[block * 32 : block * 32 + 32])


def test_blocks_are_copied_in_order_in_every_layer(ops: CpuOps) -> None:
    shapes = [LayerShape(1, 8, 8), LayerShape(2, 16, 16)]
    cache = ops.allocate_cache(shapes, 5)
    for layer in cache.layers:
        layer.copy_(torch.arange(5)[:, None].expand_as(layer))
    cache.copy_blocks([(1, 3), (3, 4), (0, 1)])
    for layer in cache.layers:
        assert layer[:, 0].tolist() == [0, 0, 2, 1, 1]
    with pytest.raises(IndexError):
        cache.copy_blocks([(0, 5)])
    assert sum(layer.nbytes for layer in cache.layers) == 5 * bytes_per_block(shapes)


def test_wrong_arguments_are_refused(ops: CpuOps) -> None:
    batch = build(ops, [(1, 5)], 6, LayerShape(2, 64, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="block_tables"):
        check(ops, batch._replace(tables=batch.tables.long()), 0.125)
    with pytest.raises(ValueError, match="q must be"):
        check(ops, batch._replace(q=batch.q.float()), 0.125)
    with pytest.raises(ValueError, match="multiple of 16"):
        ops.allocate_cache([LayerShape(1, 8, 8)], 4, 24)
