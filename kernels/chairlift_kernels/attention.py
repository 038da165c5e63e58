"""The launches of paged attention: leading decode rows in the decode shape, the rest in the
prefill shape."""

from typing import NamedTuple

import torch
import triton

from chairlift_kernels.kv_cache import Layer
from chairlift_kernels.launch_table import (
    MERGE_CHUNK,
    SPLIT_KEYS,
    Capability,
    Shape,
    attention_shape,
    padded,
)
from chairlift_kernels.merge_splits import merge_splits_kernel
from chairlift_kernels.paged_attention import paged_attention_kernel


class Rows(NamedTuple):
    """The batch: int32 [R, max_blocks], [R + 1] and [R] on the device; the rest is the host's."""

    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    num_decodes: int
    max_seq_len: int


class Options(NamedTuple):
    """What the model's layer asks for; sinks fp32 [H]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def splits_needed(max_seq_len: int, window: int | None) -> int:
    """Most splits of S keys that a row can touch; a window of W keys touches (W - 2) // S + 2."""
    splits = max(1, triton.cdiv(max_seq_len, SPLIT_KEYS))
    return splits if window is None else min(splits, (window - 2) // SPLIT_KEYS + 2)


def lengths_of_forms(max_seq_len: int) -> list[int]:
    """A length that one split holds, and one that needs two: other kernels serve them."""
    return [length for length in (2, SPLIT_KEYS + 1) if length <= max_seq_len]


def attend_rows(
    q: torch.Tensor,
    cache: Layer,
    rows: Rows,
    options: Options,
    out: torch.Tensor,
    capability: Capability,
) -> None:
    """Attention of q [T, H, D] into out [T, H, Dv]; the cache holds the new keys already."""
    tokens, heads, size = q.shape
    total_rows = rows.seq_lens.shape[0]
    group = heads // cache.keys.shape[2]
    largest = max(size, cache.values.shape[3])
    sizes = (capability, largest, group, q.dtype, cache.keys.dtype)
    if rows.num_decodes:
        shape = attention_shape(*sizes, decode=True)
        splits = splits_needed(rows.max_seq_len, options.window)
        grid = (cache.keys.shape[2], rows.num_decodes, splits)
        scratch = None
        if splits > 1:
            parts = (rows.num_decodes, heads, splits)
            acc = torch.empty(*parts, out.shape[2], dtype=torch.float32, device=q.device)
            scratch = (acc, torch.empty(*parts, 2, dtype=torch.float32, device=q.device))
        part = (0, rows.num_decodes, splits)
        _launch(grid, shape, q, cache, rows, options, out, part, scratch)
        if scratch is not None:
            _merge(scratch, rows, options.window, out, splits)
    if total_rows > rows.num_decodes and tokens > rows.num_decodes:
        shape = attention_shape(*sizes, decode=False)
        count = total_rows - rows.num_decodes
        # Row i begins at block start_i // BLOCK_Q + i, so this many blocks always suffice.
        blocks = (tokens - rows.num_decodes) // (shape.block_m // group) + count
        grid = (cache.keys.shape[2], blocks, 1)
        _launch(grid, shape, q, cache, rows, options, out, (rows.num_decodes, count, 0), None)


def _launch(
    grid: tuple[int, int, int],
    shape: Shape,
    q: torch.Tensor,
    cache: Layer,
    rows: Rows,
    options: Options,
    out: torch.Tensor,
    part: tuple[int, int, int],
    scratch: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """One launch on `part`: first row, number of rows, splits (0 for the prefill shape)."""
    first_row, num_rows, splits = part
    acc, stats = scratch or (None, None)
    heads, size, v_size = q.shape[1], q.shape[2], out.shape[2]
    paged_attention_kernel[grid](
        q, cache.keys, cache.values, out, acc, stats,
        options.sinks, *(cache.scales or (None, None)),
        rows.block_tables, rows.query_start, rows.seq_lens,
        first_row, num_rows, splits, options.scale, options.softcap or 0.0, options.window or 0,
        q.stride(0), q.stride(1), *cache.keys.stride()[1:3], *cache.values.stride()[1:3],
        out.stride(0), out.stride(1), rows.block_tables.stride(0),
        HEADS=heads, GROUP=heads // cache.keys.shape[2], D=size, DV=v_size,
        D_PAD=padded(size), DV_PAD=padded(v_size), BLOCK_SIZE=cache.keys.shape[1],
        BLOCK_M=shape.block_m, TILE=shape.tile, SPLIT=SPLIT_KEYS if splits else 0,
        PARTIAL=acc is not None,
        WINDOW=options.window is not None, SOFTCAP=options.softcap is not None,
        SINKS=options.sinks is not None, SCALED=cache.scales is not None,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip


def _merge(
    scratch: tuple[torch.Tensor, torch.Tensor],
    rows: Rows,
    window: int | None,
    out: torch.Tensor,
    splits: int,
) -> None:
    heads, v_size = out.shape[1:]
    merge_splits_kernel[(rows.num_decodes, heads)](
        *scratch, out, rows.query_start, rows.seq_lens,
        splits, window or 0, out.stride(0), out.stride(1),
        HEADS=heads, DV=v_size, DV_PAD=padded(v_size), SPLIT=SPLIT_KEYS, CHUNK=MERGE_CHUNK,
        WINDOW=window is not None, num_warps=4,
    )  # fmt: skip
