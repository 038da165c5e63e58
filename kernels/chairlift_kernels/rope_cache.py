"""Rotary embedding, q/k norm and the KV write in one pass over the output of the q-k-v projection.

For every head of q and k, over its first R dimensions (R <= D; the others pass through):

    x = rms_norm(x) per head, where the model has q/k norms (rms_norm.py has the two forms)
    out[i]         = x[i] cos[i]             - x[i + R/2] sin[i]             i < R/2
    out[i + R/2]   = x[i + R/2] cos[i + R/2] + x[i] sin[i + R/2]

    qkv            [T, H D + H_kv D + H_kv Dv]: q heads, k heads, v heads; last dimension contiguous
    cos, sin       [T, R]; norm weights [D]; q out [T, H, D]
    k, v cache     [blocks, block_size, H_kv, D or Dv]: k rotated, v as it is; an e4m3 cache takes
                   round(x / scale of the head)
    slot_mapping   int64 [T]: the slot of token t, in block slot // block_size; -1 writes nothing
    k_scale, v_scale   fp32 [H_kv]
"""

import triton
import triton.language as tl

from chairlift_kernels.kv_write import to_cache
from chairlift_kernels.rms_norm import normalise


@triton.jit
def _load_part(base, offset: tl.constexpr, size: tl.constexpr, present, PAD: tl.constexpr):
    """Dimensions [offset, offset + size) of some heads, fp32 [heads, PAD]."""
    dims = tl.arange(0, PAD)
    mask = present[:, None] & (dims[None, :] < size)
    return tl.load(base[:, None] + offset + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_part(base, offset: tl.constexpr, size: tl.constexpr, present, values):
    dims = tl.arange(0, values.shape[1])
    mask = present[:, None] & (dims[None, :] < size)
    tl.store(base[:, None] + offset + dims[None, :], values, mask=mask)


@triton.jit
def _load_row(base, offset: tl.constexpr, size: tl.constexpr, PAD: tl.constexpr):
    dims = tl.arange(0, PAD)
    return tl.load(base + offset + dims, mask=dims < size, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _rotated(
    head, present, cos, sin, norm, eps, dtype: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr,
    NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Normed, rotated heads in three parts: halves [heads, HALF_PAD], tail [heads, TAIL_PAD]."""
    HALF: tl.constexpr = R // 2
    x1 = _load_part(head, 0, HALF, present, HALF_PAD)
    x2 = _load_part(head, HALF, HALF, present, HALF_PAD)
    tail = _load_part(head, R, D - R, present, TAIL_PAD)
    if NORM:
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1) + tl.sum(tail * tail, axis=1)
        mean = (squares / D)[:, None]
        x1 = normalise(x1, _load_row(norm, 0, HALF, HALF_PAD), mean, eps, dtype, UNIT_OFFSET)
        x2 = normalise(x2, _load_row(norm, HALF, HALF, HALF_PAD), mean, eps, dtype, UNIT_OFFSET)
        tail = normalise(tail, _load_row(norm, R, D - R, TAIL_PAD), mean, eps, dtype, UNIT_OFFSET)
    y1 = x1 * _load_row(cos, 0, HALF, HALF_PAD) - x2 * _load_row(sin, 0, HALF, HALF_PAD)
    y2 = x2 * _load_row(cos, HALF, HALF, HALF_PAD) + x1 * _load_row(sin, HALF, HALF, HALF_PAD)
    return y1, y2, tail


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def rope_cache_kernel(
    qkv_ptr, cos_ptr, sin_ptr, q_out_ptr, k_ptr, v_ptr, k_scale, v_scale, slot_mapping,
    q_norm, k_norm, eps,
    stride_qkv, stride_cos, stride_sin, stride_q_token,
    stride_k_block, stride_k_slot, stride_k_head, stride_v_block, stride_v_slot, stride_v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    HALF_PAD: tl.constexpr, TAIL_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (T, groups of q heads, then groups of KV heads), BLOCK_H heads a group."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    row = qkv_ptr + token * stride_qkv
    cos = cos_ptr + token * stride_cos
    sin = sin_ptr + token * stride_sin
    dtype = qkv_ptr.dtype.element_ty
    if group < q_groups:
        heads = group * BLOCK_H + tl.arange(0, BLOCK_H)
        present = heads < HEADS
        y1, y2, tail = _rotated(
            row + heads * D, present, cos, sin, q_norm, eps, dtype,
            D, R, HALF_PAD, TAIL_PAD, NORM, UNIT_OFFSET,
        )  # fmt: skip
        out = q_out_ptr + token * stride_q_token + heads * D
        _store_part(out, 0, R // 2, present, y1.to(dtype))
        _store_part(out, R // 2, R // 2, present, y2.to(dtype))
        _store_part(out, R, D - R, present, tail.to(dtype))
        return
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = (group - q_groups) * BLOCK_H + tl.arange(0, BLOCK_H)
    present = heads < KV_HEADS
    block = slot // BLOCK_SIZE
    entry = slot % BLOCK_SIZE
    scale_k = tl.load(k_scale + heads, mask=present, other=1.0)[:, None] if SCALED else 1.0
    scale_v = tl.load(v_scale + heads, mask=present, other=1.0)[:, None] if SCALED else 1.0
    y1, y2, tail = _rotated(
        row + (HEADS + heads) * D, present, cos, sin, k_norm, eps, dtype,
        D, R, HALF_PAD, TAIL_PAD, NORM, UNIT_OFFSET,
    )  # fmt: skip
    k_type = k_ptr.dtype.element_ty
    k_out = k_ptr + block * stride_k_block + entry * stride_k_slot
    k_out += heads.to(tl.int64) * stride_k_head
    y1 = to_cache(y1.to(dtype).to(tl.float32), scale_k, k_type, SCALED)
    y2 = to_cache(y2.to(dtype).to(tl.float32), scale_k, k_type, SCALED)
    _store_part(k_out, 0, R // 2, present, y1)
    _store_part(k_out, R // 2, R // 2, present, y2)
    _store_part(k_out, R, D - R, present, to_cache(tail, scale_k, k_type, SCALED))
    value = _load_part(row + (HEADS + KV_HEADS) * D + heads * DV, 0, DV, present, DV_PAD)
    v_out = (
        v_ptr + block * stride_v_block + entry * stride_v_slot + heads.to(tl.int64) * stride_v_head
    )
    _store_part(v_out, 0, DV, present, to_cache(value, scale_v, v_ptr.dtype.element_ty, SCALED))
