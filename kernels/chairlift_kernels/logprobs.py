"""Log-probabilities of the chosen token, its rank, and the n likeliest tokens, without a sort.

    chosen = l_c - log sum_j e^l_j          rank = 1 + #{j: l_j > l_c}
    top    the n largest l_j less the same logarithm; among equals the lowest id comes first

    logits   [R, V], fp32, bf16 or fp16, last dimension contiguous; token_ids int64 [R]

The n likeliest of every block of V are found by n rounds of argmax in registers, then the n
likeliest of those.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift_kernels.launch_table import TOP_TOKENS, VOCAB_BLOCK

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Stands for -inf among candidates: -inf itself marks those already taken.
LEAST = tl.constexpr(-3.0e38)


class Logprobs(NamedTuple):
    """fp32 chosen [R], top [R, n] and log_sum [R] = log sum e^l; rank int32 [R], top_ids int64."""

    chosen: torch.Tensor
    rank: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor
    log_sum: torch.Tensor


@triton.jit(do_not_specialize_on_alignment=["token_ids", "chosen", "rank"])
def token_logprob_kernel(
    logits, token_ids, chosen, rank, log_sum, stride_row, size, BLOCK: tl.constexpr
):
    """Grid (R,)."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_row
    mine = tl.load(row + tl.load(token_ids + index)).to(tl.float32)
    peak = tl.full([BLOCK], LEAST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, x)
        total = total * tl.exp2((peak - new_peak) * LOG2E) + tl.exp2((x - new_peak) * LOG2E)
        above += (x > mine).to(tl.int32)
        peak = new_peak
    top = tl.max(peak, axis=0)
    whole = tl.sum(total * tl.exp2((peak - top) * LOG2E), axis=0)
    sum_log = top + tl.log2(whole) * LN2
    tl.store(log_sum + index, sum_log)
    tl.store(chosen + index, mine - sum_log)
    tl.store(rank + index, tl.sum(above, axis=0) + 1)


@triton.jit(do_not_specialize=["count"])
def block_top_kernel(logits, values, ids, stride_row, size, count, BLOCK: tl.constexpr):
    """Grid (R, blocks of V): each block's `count` largest logits, fp32, and their ids, int32."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + index * stride_row + columns, mask=columns < size, other=0.0)
    x = tl.where(columns < size, tl.maximum(x.to(tl.float32), LEAST), float("-inf"))
    at = (index * tl.num_programs(1) + part) * count
    for i in range(count):
        best, place = tl.max(x, axis=0, return_indices=True)
        tl.store(values + at + i, best)
        tl.store(ids + at + i, part * BLOCK + place)
        x = tl.where(columns == part * BLOCK + place, float("-inf"), x)


@triton.jit(do_not_specialize=["candidates", "count"])
def merge_top_kernel(
    values, ids, log_sum, top, top_ids, candidates, count, CANDIDATES: tl.constexpr
):
    """Grid (R,): the best of a row's candidates, which lie in the order of their blocks."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CANDIDATES)
    mine = index * candidates
    x = tl.load(values + mine + columns, mask=columns < candidates, other=float("-inf"))
    whole = tl.load(log_sum + index)
    for i in range(count):
        best, place = tl.max(x, axis=0, return_indices=True)
        logprob = tl.where(best <= LEAST, float("-inf"), best - whole)
        tl.store(top + index * count + i, logprob)
        tl.store(top_ids + index * count + i, tl.load(ids + mine + place).to(tl.int64))
        x = tl.where(columns == place, float("-inf"), x)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """Log-probabilities of the chosen token and of the `count` likeliest, 0 <= count <= V."""
    rows, size = logits.shape
    parts = triton.cdiv(size, VOCAB_BLOCK)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    chosen, log_sum = empty(torch.float32, rows), empty(torch.float32, rows)
    rank = empty(torch.int32, rows)
    token_logprob_kernel[(rows,)](
        logits, token_ids, chosen, rank, log_sum, logits.stride(0), size,
        BLOCK=VOCAB_BLOCK, num_warps=8,
    )  # fmt: skip
    top, top_ids = empty(torch.float32, rows, count), empty(torch.int64, rows, count)
    if count:
        candidates = parts * count
        values, ids = empty(torch.float32, rows, candidates), empty(torch.int32, rows, candidates)
        block_top_kernel[(rows, parts)](
            logits, values, ids, logits.stride(0), size, count, BLOCK=VOCAB_BLOCK, num_warps=8
        )
        merge_top_kernel[(rows,)](
            values, ids, log_sum, top, top_ids, candidates, count,
            CANDIDATES=triton.next_power_of_2(parts * max(count, TOP_TOKENS)), num_warps=8,
        )  # fmt: skip
    return Logprobs(chosen, rank, top_ids, top, log_sum)
