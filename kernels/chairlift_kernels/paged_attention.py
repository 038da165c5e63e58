"""Attention of query tokens over a paged KV cache: one body, launched in two shapes.

For a query token at position p of a request, query head h and its KV head g = h // G, G = H / H_kv:

    s_j = scale * <q_h, k_gj>                   keys j <= p, and j > p - window where there is one
    s_j = softcap * tanh(s_j / softcap)         where there is a softcap
    out = sum_j e^s_j v_gj / (sum_j e^s_j + e^sink_h)       the sink where the model has them

    q, out         [T, H, D], [T, H, Dv]: bf16, fp16 or fp32; last dimension contiguous
    k, v cache     [blocks, block_size, H_kv, D or Dv], contiguous: q's dtype, or e4m3 with scales
    block_tables   int32 [R, max_blocks]
    query_start    int32 [R + 1]; seq_lens int32 [R], new tokens counted
    sinks          [H] in any float type; k_scale, v_scale fp32 [H_kv]

A program owns BLOCK_M rows: row r is (token r // G, query head g * G + r % G), so that a tile of
keys is read once for all query heads that share it; rows past BLOCK_Q * G idle. Keys come in tiles
at fixed multiples of TILE and, in the decode shape, splits at fixed multiples of SPLIT: the order
of additions follows from positions alone, never from the batch or from how a prompt was cut into
chunks. Grids follow from sizes known to the host; programs without work return.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _find_row(query_start, first_row, num_rows, block, BLOCK_Q: tl.constexpr):
    """The row of a block of query tokens and its first token in the row.

    Row i has the blocks from start_i // BLOCK_Q + i on: room for its last, part-full one.
    """
    base = tl.load(query_start + first_row)
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        start = (tl.load(query_start + first_row + middle) - base) // BLOCK_Q + middle
        if start <= block:
            low = middle
        else:
            high = middle
    first_block = (tl.load(query_start + first_row + low) - base) // BLOCK_Q + low
    return first_row + low, (block - first_block) * BLOCK_Q


@triton.jit
def _load_tile(base, offsets, present, MASKED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows at int64 offsets, [TILE, D_PAD]; absent keys read 0, as 0 * NaN would still be NaN."""
    dims = tl.arange(0, D_PAD)
    pointers = base + offsets[:, None] + dims[None, :]
    if MASKED and D != D_PAD:
        tile = tl.load(pointers, mask=present[:, None] & (dims[None, :] < D), other=0.0)
    elif MASKED:
        tile = tl.load(pointers, mask=present[:, None], other=0.0)
    elif D != D_PAD:
        tile = tl.load(pointers, mask=dims[None, :] < D, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _attend_tiles(
    sums, q, q_pos, pages, begin, end, key_low, key_high, scale, softcap, window,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """Online softmax over the tiles of [begin, end); `scale` holds log2(e), so that exp2 serves."""
    acc, row_max, row_sum = sums
    k_head, v_head, table, stride_k_slot, stride_v_slot = pages
    for start in range(begin, end, TILE):
        keys = start + tl.arange(0, TILE)
        present = (keys >= key_low) & (keys < key_high)
        if MASKED:
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=present, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        # A slot fits in 32 bits (KvCache sees to it), its product with a stride does not.
        slots = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE).to(tl.int64)
        k_rows = slots * stride_k_slot
        v_rows = k_rows if D == DV else slots * stride_v_slot
        k = _load_tile(k_head, k_rows, present, MASKED, D, D_PAD).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        factor = scale
        if SOFTCAP:  # tanh as 1 - 2 / (e^2y + 1): the form with two exponentials gives inf / inf
            scores = softcap * LOG2E * (1 - 2 / (tl.exp2(scores * (2 * scale / softcap)) + 1))
            factor = 1.0
        if MASKED:
            visible = (keys[None, :] <= q_pos[:, None]) & present[None, :]
            if WINDOW:
                visible = visible & (keys[None, :] > q_pos[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * factor)
        # A row that has seen no key yet has max -inf, and -inf - -inf is NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        # Written as fused multiply-adds so that masked and unmasked tiles round alike.
        p = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
        fade = tl.exp2(row_max - shift)
        row_sum = tl.fma(row_sum, fade, tl.sum(p, axis=1))
        v = _load_tile(v_head, v_rows, present, MASKED, DV, DV_PAD).to(q.dtype)
        acc = tl.dot(p.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _key_range(
    q_first, q_last, window, split,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """(key_low, begin, full_begin, full_end, end) for queries at q_first to q_last.

    Some row sees keys from key_low on; tiles of [begin, end) are this split's, and those of
    [full_begin, full_end) need no mask, as every row sees all their keys.
    """
    key_low = tl.maximum(q_first - window + 1, 0) if WINDOW else 0
    begin = key_low // TILE * TILE
    end = q_last + 1
    if SPLIT > 0:
        split_begin = (key_low // SPLIT + split) * SPLIT
        begin = tl.maximum(begin, split_begin)
        end = tl.minimum(end, split_begin + SPLIT)
    full_begin = begin
    if WINDOW:
        full_begin = tl.cdiv(tl.maximum(q_last - window + 1, 0), TILE) * TILE
        full_begin = tl.maximum(begin, tl.minimum(full_begin, end))
    full_end = tl.minimum(q_first + 1, end) // TILE * TILE
    return key_low, begin, full_begin, tl.maximum(full_end, full_begin), end


@triton.jit(
    do_not_specialize=["first_row", "num_rows", "num_splits", "window", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "query_start", "seq_lens"],
)
def paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_acc, partial_stats,
    sinks, k_scale, v_scale, block_tables, query_start, seq_lens,
    first_row, num_rows, num_splits, scale, softcap, window,
    stride_q_token, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_out_token, stride_out_head, stride_table,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PARTIAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Grid (H_kv, blocks of query tokens, splits).

    SPLIT 0 is the prefill shape; PARTIAL leaves each split's sums for merge_splits.py.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    split = tl.program_id(2)
    if SPLIT > 0:
        row = first_row + tl.program_id(1)
        token = 0
    else:  # late blocks of a prompt have most keys: they start first, and no long one is left over
        block = tl.num_programs(1) - 1 - tl.program_id(1)
        row, token = _find_row(query_start, first_row, num_rows, block, BLOCK_Q)
    query_begin = tl.load(query_start + row)
    query_len = tl.load(query_start + row + 1) - query_begin
    if token >= query_len:
        return
    seq_len = tl.load(seq_lens + row)
    q_first = seq_len - query_len + token
    q_last = tl.minimum(q_first + BLOCK_Q, seq_len) - 1
    key_low, begin, full_begin, full_end, end = _key_range(
        q_first, q_last, window, split, WINDOW, TILE, SPLIT
    )
    if PARTIAL and begin > q_last:
        return

    rows = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + rows % GROUP
    valid = (token + rows // GROUP < query_len) & (rows < BLOCK_Q * GROUP)
    q_pos = q_first + rows // GROUP
    q_tokens = (query_begin + token + rows // GROUP).to(tl.int64)
    head_64 = head.to(tl.int64)
    dims = tl.arange(0, D_PAD)
    q_rows = q_ptr + q_tokens * stride_q_token + head_64 * stride_q_head
    q_mask = valid[:, None] & (dims[None, :] < D)
    q = tl.load(q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    k_head = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head = v_ptr + kv_head.to(tl.int64) * stride_v_head
    table = block_tables + row.to(tl.int64) * stride_table
    pages = (k_head, v_head, table, stride_k_slot, stride_v_slot)
    if SCALED:
        scale *= tl.load(k_scale + kv_head)
    scale *= LOG2E

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS and split == 0:  # a sink is a key without a value, counted once
        row_max = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    sums = (tl.zeros([BLOCK_M, DV_PAD], tl.float32), row_max, row_sum)
    if WINDOW:
        sums = _attend_tiles(
            sums, q, q_pos, pages, begin, full_begin, key_low, q_last + 1, scale, softcap, window,
            True, True, SOFTCAP, BLOCK_SIZE, TILE, D, D_PAD, DV, DV_PAD,
        )  # fmt: skip
    sums = _attend_tiles(
        sums, q, q_pos, pages, full_begin, full_end, key_low, q_last + 1, scale, softcap, window,
        False, WINDOW, SOFTCAP, BLOCK_SIZE, TILE, D, D_PAD, DV, DV_PAD,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        sums, q, q_pos, pages, full_end, end, key_low, q_last + 1, scale, softcap, window,
        True, WINDOW, SOFTCAP, BLOCK_SIZE, TILE, D, D_PAD, DV, DV_PAD,
    )  # fmt: skip

    if SCALED:
        acc *= tl.load(v_scale + kv_head)
    dims_v = tl.arange(0, DV_PAD)
    stored = valid[:, None] & (dims_v[None, :] < DV)
    if PARTIAL:
        part = ((row - first_row).to(tl.int64) * HEADS + head) * num_splits + split
        tl.store(partial_acc + part[:, None] * DV + dims_v[None, :], acc, mask=stored)
        tl.store(partial_stats + part * 2, row_max, mask=valid)
        tl.store(partial_stats + part * 2 + 1, row_sum, mask=valid)
    else:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        out = out_ptr + q_tokens * stride_out_token + head_64 * stride_out_head
        tl.store(out[:, None] + dims_v[None, :], acc.to(out_ptr.dtype.element_ty), mask=stored)
