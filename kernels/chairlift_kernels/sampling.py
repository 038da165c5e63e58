"""Sampling of one token a row without sorting: a threshold for the filters, then Gumbel-max with
hashed noise.

With z = logits / temperature, p = softmax(z), and m = max p, a row keeps the tokens whose logit is
at least

    t_p >= t_0 = max(t_k, t_m)

    t_m   max l + temperature * ln(min_p), that is p >= min_p * m
    t_k   the largest t with #{l >= t} >= top_k
    t_p   the largest t with mass{l >= t} >= top_p * mass{l >= t_0}

so that top-p shares out what min-p and top-k left; tokens tied at a threshold are all kept. The
token is argmax(z + noise) over the kept, with the noise of noise.py for (seed, sample index,
position, token id); ties go to the lowest id, and temperature 0 takes argmax(l).

    logits        [R, V], fp32, bf16 or fp16, -inf for tokens not allowed; last dimension contiguous
    temperature, top_p, min_p   fp32 [R]; off: top_p 1, min_p 0.    top_k int32 [R]; off: 0
    seeds, sample_index, positions    int64 [R]

The search for t halves twice a pass over the 2^32 floats in their order, 16 passes over a row that
stays in L2, and is exact: it ends on the logit of a token. Sums of the same row are always taken
in the same order and shrink with t, as rounding is monotone, so that the search is sound in
floating point too.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chairlift_kernels.launch_table import VOCAB_BLOCK
from chairlift_kernels.noise_device import gumbel

LOG2E = tl.constexpr(1.4426950408889634)


class Sampled(NamedTuple):
    """token_ids int64 [R]; finite bool [R], false where logits hold NaN, +inf or only -inf."""

    token_ids: torch.Tensor
    finite: torch.Tensor


@triton.jit
def _ordered(x):
    """Bits of a float32 as an integer in the order of the floats; its own inverse on the bits."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass_above(
    row, size, pivots, top, slope, COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Per pivot, the sum of 1 (COUNT) or of 2^((l - top) * slope) over l >= pivot, fp32."""
    acc = tl.zeros([PIVOTS, BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        weight = tl.full([BLOCK], 1.0, tl.float32) if COUNT else tl.exp2((x - top) * slope)
        weight = tl.where(columns < size, weight, 0.0)
        acc += tl.where(x[None, :] >= pivots[:, None], weight[None, :], 0.0)
    return tl.sum(acc, axis=1)


@triton.jit
def _largest_threshold(
    row, size, top, slope, target, COUNT: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest float t such that the mass at or above it reaches the target."""
    low = _ordered(tl.full((), float("-inf"), tl.float32).to(tl.int32, bitcast=True)).to(tl.int64)
    high = _ordered(top.to(tl.int32, bitcast=True)).to(tl.int64) + 1
    while high - low > 1:
        step = (high - low + PIVOTS - 1) // PIVOTS
        keys = tl.minimum(low + step * (tl.arange(0, PIVOTS) + 1), high)
        pivots = _ordered(keys.to(tl.int32)).to(tl.float32, bitcast=True)
        mass = _mass_above(row, size, pivots, top, slope, COUNT, PIVOTS, BLOCK)
        passed = tl.sum(((mass >= target) & (keys < high)).to(tl.int64), axis=0)
        low += step * passed
        high = tl.minimum(low + step, high)
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p", "threshold"],
)
def threshold_kernel(
    logits, temperature, top_k, top_p, min_p, threshold, stride_row, size,
    PIVOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R,): the lowest logit that row keeps, -inf where nothing filters."""
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride_row
    t = tl.load(temperature + index)
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    least = tl.load(min_p + index)
    result = tl.full((), float("-inf"), tl.float32)
    if (t > 0) & (((k > 0) & (k < size)) | (p < 1) | (least > 0)):
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
            tops = tl.maximum(tops, x)
        top = tl.max(tops, axis=0)
        slope = LOG2E / t
        if (top > float("-inf")) & (top < float("inf")):
            if (k > 0) & (k < size):
                target = k.to(tl.float32)
                result = _largest_threshold(row, size, top, slope, target, True, PIVOTS, BLOCK)
            if least > 0:
                result = tl.maximum(result, top + t * tl.log(tl.minimum(least, 1.0)))
            if p < 1:
                kept = tl.full([PIVOTS], 0.0, tl.float32) + result
                whole = _mass_above(row, size, kept, top, slope, False, PIVOTS, BLOCK)
                target = p * tl.max(whole, axis=0)
                found = _largest_threshold(row, size, top, slope, target, False, PIVOTS, BLOCK)
                result = tl.maximum(result, found)
    tl.store(threshold + index, result)


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature", "threshold", "seeds", "sample_index", "positions",
    ],
)  # fmt: skip
def draw_kernel(
    logits, temperature, threshold, seeds, sample_index, positions, best_score, best_token,
    stride_row, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of V): the best noisy logit of each block, NaN if one of its logits is."""
    index = tl.program_id(0)
    part = tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    row = logits + index.to(tl.int64) * stride_row
    x = tl.load(row + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    t = tl.load(temperature + index)
    score = x
    if t > 0:
        seed = tl.load(seeds + index)
        noise = gumbel(seed, tl.load(sample_index + index), tl.load(positions + index), columns)
        score = tl.where(x >= tl.load(threshold + index), x / t + noise, float("-inf"))
    best, at = tl.max(score, axis=0, return_indices=True)
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    best = tl.where(broken, float("nan"), best)
    out = index.to(tl.int64) * tl.num_programs(1) + part
    tl.store(best_score + out, best)
    tl.store(best_token + out, part * BLOCK + at)


@triton.jit(do_not_specialize=["parts"])
def pick_kernel(best_score, best_token, token_ids, finite, parts, PARTS: tl.constexpr):
    """Grid (R,): the best of the blocks."""
    index = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PARTS)
    scores = tl.load(
        best_score + index * parts + columns, mask=columns < parts, other=float("-inf")
    )
    broken = tl.sum((scores != scores).to(tl.int32), axis=0) > 0
    best, at = tl.max(
        tl.where(scores != scores, float("-inf"), scores), axis=0, return_indices=True
    )
    tl.store(token_ids + index, tl.load(best_token + index * parts + at).to(tl.int64))
    tl.store(finite + index, (best > float("-inf")) & (best < float("inf")) & (broken == 0))


def keep_threshold(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Lowest logit that each row keeps, fp32 [R]."""
    rows, size = logits.shape
    threshold = torch.empty(rows, dtype=torch.float32, device=logits.device)
    threshold_kernel[(rows,)](
        logits, temperature, top_k, top_p, min_p, threshold, logits.stride(0), size,
        PIVOTS=4, BLOCK=VOCAB_BLOCK, num_warps=16,
    )  # fmt: skip
    return threshold


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    threshold: torch.Tensor,
    seeds: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
) -> Sampled:
    """One token a row among those at or above the row's threshold."""
    rows, size = logits.shape
    parts = triton.cdiv(size, VOCAB_BLOCK)
    score = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    draw_kernel[(rows, parts)](
        logits, temperature, threshold, seeds, sample_index, positions, score, token,
        logits.stride(0), size, BLOCK=VOCAB_BLOCK, num_warps=8,
    )  # fmt: skip
    pick_kernel[(rows,)](
        score, token, token_ids, finite, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )  # fmt: skip
    return Sampled(token_ids, finite)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
) -> Sampled:
    """keep_threshold, then draw."""
    threshold = keep_threshold(logits, temperature, top_k, top_p, min_p)
    return draw(logits, temperature, threshold, seeds, sample_index, positions)
