"""The hash of noise.py for Triton-lang kernels: uniforms agree with it bit for bit."""

import triton
import triton.language as tl


@triton.jit
def _fmix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _fold(state, word):
    return _fmix((state * 5) ^ word)


@triton.jit
def row_key(seed, sample_index, position, START: tl.constexpr):
    """One 32-bit word of a row's key from int64 seed, sample index and position."""
    state = tl.full((), START, tl.uint32)
    state = _fold(state, (seed & 0xFFFFFFFF).to(tl.uint32))
    state = _fold(state, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    state = _fold(state, (sample_index & 0xFFFFFFFF).to(tl.uint32))
    return _fold(state, (position & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def uniform(key_0, key_1, token_ids):
    """Uniform float32 inside (0, 1) for a block of token ids, from the words of a row's key."""
    x = (_fmix(token_ids.to(tl.uint32) ^ 0x27D4EB2F) ^ key_0) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ key_1) * 0x846CA68B
    return ((x >> 8) | 1).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def gumbel(seed, sample_index, position, token_ids):
    """Gumbel noise float32 for a block of token ids of one row."""
    key_0 = row_key(seed, sample_index, position, 0x9E3779B9)
    key_1 = row_key(seed, sample_index, position, 0x3C6EF372)
    return -tl.log(-tl.log(uniform(key_0, key_1, token_ids)))
