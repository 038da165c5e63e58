"""Writing of keys and values into the paged cache, for models whose rotation is not fused with it
(rope_cache.py).

k, v           [T, H_kv, D], [T, H_kv, Dv], last dimension contiguous k, v cache     [blocks,
block_size, H_kv, D or Dv]; token t goes to slot slot_mapping[t], -1 writes nothing slot_mapping
int64 [T]; k_scale, v_scale fp32 [H_kv] for an e4m3 cache, which takes round(x / scale)
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def to_cache(values, scale, dtype: tl.constexpr, SCALED: tl.constexpr):
    """fp32 values in the cache's dtype; e4m3 has no infinity, so what is too large is clamped."""
    if SCALED:
        values = tl.minimum(tl.maximum(values / scale, -E4M3_MAX), E4M3_MAX)
    return values.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def kv_write_kernel(
    x_ptr, cache_ptr, scale_ptr, slot_mapping,
    stride_x_token, stride_x_head, stride_block, stride_slot, stride_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (T, groups of BLOCK_H heads); k and v are one launch each."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, D_PAD)
    mask = (heads < KV_HEADS)[:, None] & (dims < D)[None, :]
    heads_64 = heads.to(tl.int64)[:, None]
    source = x_ptr + token * stride_x_token + heads_64 * stride_x_head + dims[None, :]
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + heads, mask=heads < KV_HEADS, other=1.0)[:, None]
    target = cache_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot
    values = to_cache(values, scale, cache_ptr.dtype.element_ty, SCALED)
    tl.store(target + heads_64 * stride_head + dims[None, :], values, mask=mask)
