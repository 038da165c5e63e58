"""Merging of the key splits that the decode shape of paged_attention leaves behind.

    M = max_i m_i,   w_i = 2^(m_i - M),   out = sum_i w_i acc_i / sum_i w_i l_i

    partial_acc    fp32 [rows, H, num_splits, Dv]    unnormalised sums of split i
    partial_stats  fp32 [rows, H, num_splits, 2]     its maximum m (base 2, scaled) and its sum l
    out            [T, H, Dv]

Splits are added in chunks of a fixed size that start at the row's own first split, so that the
order follows from the row's length alone. One split alone gives the bits that the attention kernel
would have stored itself.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_splits", "window"],
    do_not_specialize_on_alignment=["query_start", "seq_lens"],
)
def merge_splits_kernel(
    partial_acc, partial_stats, out_ptr, query_start, seq_lens,
    num_splits, window, stride_out_token, stride_out_head,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SPLIT: tl.constexpr, CHUNK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid (rows, H)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start + row)
    if tl.load(query_start + row + 1) == token:
        return
    seq_len = tl.load(seq_lens + row)
    first = tl.maximum(seq_len - window, 0) // SPLIT if WINDOW else 0
    count = tl.cdiv(seq_len, SPLIT) - first
    part = (row.to(tl.int64) * HEADS + head) * num_splits
    chunk = tl.arange(0, CHUNK)
    dims = tl.arange(0, DV_PAD)

    top = tl.full([CHUNK], float("-inf"), tl.float32)
    for start in range(0, count, CHUNK):
        splits = start + chunk
        stats = partial_stats + (part + splits) * 2
        top = tl.maximum(top, tl.load(stats, mask=splits < count, other=float("-inf")))
    peak = tl.max(top, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)

    acc = tl.zeros([DV_PAD], tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, count, CHUNK):
        splits = start + chunk
        present = splits < count
        stats = partial_stats + (part + splits) * 2
        weight = tl.exp2(tl.load(stats, mask=present, other=float("-inf")) - shift)
        total += weight * tl.load(stats + 1, mask=present, other=0.0)
        values = tl.load(
            partial_acc + (part + splits)[:, None] * DV + dims[None, :],
            mask=present[:, None] & (dims[None, :] < DV), other=0.0,
        )  # fmt: skip
        acc += tl.sum(values * weight[:, None], axis=0)
    row_sum = tl.sum(total, axis=0)
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)
    out = out_ptr + token.to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
    tl.store(out + dims, acc.to(out_ptr.dtype.element_ty), mask=dims < DV)
