"""Everything the kernels choose by size or by device, in one place.

Status: the attention shapes below compile without spills and fit the shared memory of every device
of their line (perf/results/compile_matrix.md, for head sizes 64 to 256 and all options).
They were chosen by registers, shared memory and instruction counts; none has been timed yet.
`perf/gpu_check.sh` times the alternatives (its table "launch shapes") and is what may change a
line here; write the measurement beside the line it changes.
"""

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """A launch of the attention kernel: rows of queries, keys a tile, warps, pipeline stages."""

    block_m: int
    tile: int
    warps: int
    stages: int


Capability = tuple[int, int]

# Keys of one split of the decode shape; a constant, because the order of additions hangs on it. 512
# keys are 8 tiles or fewer: long enough that partial sums are under 1 % of the traffic (G * (D + 2)
# * 4 bytes against 512 * 2 D * 2 for K and V).
SPLIT_KEYS = 512
# Splits merged at once: one load of the merge kernel covers 16 * 512 keys of context.
MERGE_CHUNK = 16
# q, k or v heads that one program of rope_cache takes: 8 heads of 128 in bf16 are 2 KiB, 16 bytes
# for each of 2 warps' lanes twice.
HEADS_PER_PROGRAM = 8
ACTIVATION_BLOCK = 1024
COPY_BLOCK = 2048
# Logits that one program of the sampling kernels holds in registers at a time.
VOCAB_BLOCK = 4096
# Requests for up to so many top tokens share one compiled kernel; 20 is what most servers allow.
TOP_TOKENS = 32

# decode: rows are the query heads of one KV head, and 16 rows are the matrix unit's least. A tile
# of 128 keys takes 403 instructions where two of 64 take 632 (sm_90, D 128, bf16), in 129 registers
# and 72 KB: 3 programs on a multiprocessor.
DECODE = {64: Shape(16, 128, 4, 2), 128: Shape(16, 128, 4, 2), 256: Shape(16, 64, 4, 2)}
# Head sizes below the padded one mask every load: with the tiles above they spill. sm_80's line
# takes these too.
DECODE_TIGHT = {64: Shape(16, 64, 4, 2), 128: Shape(16, 64, 4, 2), 256: Shape(16, 32, 4, 2)}
# On sm_89 and sm_120 the compiler spills a little to fit one more program, where 4 warps need 109
# to 146 registers; 8 need 108 at most. 38 KB at D 128 let two programs share the 100 KB there.
DECODE_SM_89 = {64: Shape(16, 64, 4, 2), 128: Shape(16, 64, 8, 2), 256: Shape(16, 32, 4, 2)}
# More than 32 query heads of a KV head make a tile of 64 rows, which 128 keys spill for on sm_100
# and 64 on sm_89; sm_120 spills at 17 to 32 too (splits, blocks of 32 tokens).
DECODE_WIDE = {64: Shape(64, 64, 4, 2), 128: Shape(64, 32, 4, 2), 256: Shape(64, 32, 8, 2)}
# e4m3 is widened in registers.
DECODE_E4M3 = {64: Shape(16, 128, 4, 2), 128: Shape(16, 128, 4, 2), 256: Shape(16, 64, 8, 2)}
# prefill: 128 x 64 with 8 warps is wgmma without spills on sm_90 (190 registers, 96 KB at D 128);
# 64 x 64 with 4 warps spills on sm_80 and sm_120 at D 128, and with 8 on sm_89 and sm_120, where
# 128 x 32 does so at D 80. Above D 128, 64 rows need 8 warps.
PREFILL = {
    "sm_80": {64: Shape(128, 64, 8, 3), 128: Shape(64, 64, 8, 2), 256: Shape(64, 32, 8, 2)},
    "sm_89": {64: Shape(128, 64, 8, 3), 128: Shape(64, 32, 4, 2), 256: Shape(64, 32, 8, 2)},
    "sm_90": {64: Shape(128, 64, 8, 3), 128: Shape(128, 64, 8, 3), 256: Shape(64, 64, 8, 2)},
    "gfx9": {64: Shape(64, 32, 4, 2), 128: Shape(64, 32, 4, 2), 256: Shape(32, 32, 8, 1)},
    "sm_100": {64: Shape(64, 64, 4, 2), 128: Shape(128, 64, 8, 3), 256: Shape(64, 64, 8, 2)},
}
# e4m3 keys and values are widened in registers, which D 256 has no room for in tiles of 64 keys.
PREFILL_E4M3 = {256: Shape(64, 32, 8, 2)}
# fp32 inputs are multiplied in full precision, without the matrix units: small tiles, for checks
# and tiny models.
FULL_PRECISION = {64: Shape(16, 16, 8, 2), 128: Shape(16, 16, 4, 2), 256: Shape(16, 16, 8, 2)}


def capability_of(device: torch.device) -> Capability:
    """Compute capability of a CUDA device; (8, 0) stands for the interpreter's CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


def supports_fp8(capability: Capability) -> bool:
    """e4m3 conversion exists from sm_89 on."""
    return capability >= (8, 9)


def family_of(capability: Capability) -> str:
    """sm_80's line also serves sm_86, and sm_89's sm_12x; gfx942 reports itself as (9, 4)."""
    if capability[0] == 9 and capability[1] > 0:
        return "gfx9"
    if capability == (8, 9):
        return "sm_89"
    return {9: "sm_90", 10: "sm_100", 12: "sm_89"}.get(capability[0], "sm_80")


def padded(size: int) -> int:
    """A dimension as tl.arange and tl.dot take it: a power of two, 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def attention_shape(
    capability: Capability,
    head_size: int,
    group: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    *,
    decode: bool,
) -> Shape:
    """Shape for the larger of the head sizes and G query heads a KV head.

    A group larger than the tile makes the tile as large as the group. ValueError above size 256.
    """
    limit = max(64, padded(head_size))
    if limit > 256:
        raise ValueError(f"head size {head_size} is above 256")
    family = family_of(capability)
    e4m3 = cache_dtype.itemsize == 1
    if dtype == torch.float32:
        line = FULL_PRECISION
    elif not decode:
        line = PREFILL[family] | PREFILL_E4M3 if e4m3 else PREFILL[family]
    elif group > (16 if family == "sm_89" else 32):
        line = DECODE_WIDE
    elif family == "sm_89":
        line = DECODE_SM_89
    elif head_size < limit or family in ("sm_80", "gfx9"):
        line = DECODE_TIGHT
    else:
        line = DECODE_E4M3 if e4m3 else DECODE
    shape = line[limit]
    return shape._replace(block_m=max(shape.block_m, padded(group)))


def row_warps(block: int) -> int:
    """Warps for a kernel that holds a row of `block` elements: about 16 elements a lane."""
    return min(16, max(1, block // 512))
