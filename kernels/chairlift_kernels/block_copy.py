"""Copy of cache blocks, all layers at once: a fork gives its child a copy of the unfinished last
block.

    cache[l, dst_i] = cache[l, src_i]      for every pair i and layer l
    cache   [L, blocks, block_size, H_kv, D], each block contiguous
    pairs   int64 [n, 2] of (src, dst)

Pairs of one launch must not depend on each other (kv_cache.independent_waves): they run in no
order.
"""

import triton
import triton.language as tl


@triton.jit
def block_copy_kernel(
    cache_ptr, pairs_ptr, stride_layer, stride_block, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (pairs, L, parts of a block of SIZE elements)."""
    pair = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + pair * 2).to(tl.int64)
    target = tl.load(pairs_ptr + pair * 2 + 1).to(tl.int64)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = cache_ptr + layer * stride_layer + offsets
    values = tl.load(base + source * stride_block, mask=offsets < SIZE)
    tl.store(base + target * stride_block, values, mask=offsets < SIZE)
