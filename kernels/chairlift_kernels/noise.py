"""Gumbel noise addressed by (seed, sample index, position, token id), the same on every device.

A request draws the same noise whatever else is in its batch, and no generator object has to
travel: the noise is a hash. One row of logits has a key of two 32-bit words, and one token a hash
of 32 bits,

    key_i = fold of fmix over (seed low, seed high, sample index, position), started from START_i
    x     = ((token_hash ^ key_0) * M1) mod 2^32
    x     = ((x ^ (x >> 15) ^ key_1) * M2) mod 2^32
    u     = ((x >> 8) | 1) / 2^24      odd over 2^24: exact in float32 and never 0 or 1
    noise = -log(-log u)

so that argmax(log p + noise) is a sample of p. `noise_device.py` is the same arithmetic for
Triton-lang kernels; uniforms agree bit for bit, noise up to the last places of the two logarithms.
"""

import torch

MASK = 0xFFFFFFFF
START_0, START_1 = 0x9E3779B9, 0x3C6EF372
# fmix multiplies by these two; the shifts and constants are the low-bias 32-bit finaliser of C.
# Wellons' hash search.
M1, M2 = 0x7FEB352D, 0x846CA68B
TOKEN_START = 0x27D4EB2F


def _signed(word: int) -> int:
    """The int32 with the same 32 bits as an unsigned word."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _fmix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words held in int64; products that wrap keep their low 32 bits."""
    x = ((x ^ (x >> 16)) * M1) & MASK
    x = ((x ^ (x >> 15)) * M2) & MASK
    return x ^ (x >> 16)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    """int64 words of 32 bits -> int32 with the same bits."""
    return (((words + (1 << 31)) & MASK) - (1 << 31)).to(torch.int32)


def row_keys(
    seeds: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Keys int32 [R, 2] from int64 [R] seeds (64 bits), sample indices and positions (32 bits)."""
    words = (seeds & MASK, (seeds >> 32) & MASK, sample_index & MASK, positions & MASK)
    keys = []
    for start in (START_0, START_1):
        state = torch.full_like(seeds, start)
        for word in words:
            state = _fmix(((state * 5) & MASK) ^ word)
        keys.append(_as_int32(state))
    return torch.stack(keys, dim=1)


def token_hash(token_ids: torch.Tensor) -> torch.Tensor:
    """Hashes of token ids, int32 of the same shape; those of a whole vocabulary can be kept."""
    return _as_int32(_fmix((token_ids.to(torch.int64) & MASK) ^ TOKEN_START))


def uniform_from(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Uniform float32 [R, n] inside (0, 1) from int32 keys [R, 2] and hashes [n] or [R, n]."""
    x = (hashes ^ keys[:, :1]).mul_(M1)
    high = (x >> 15).bitwise_and_(0x1FFFF)  # int32 shifts bring in copies of the sign
    x.bitwise_xor_(high).bitwise_xor_(keys[:, 1:]).mul_(_signed(M2))
    x.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).bitwise_or_(1)
    return x.to(torch.float32).mul_(2.0**-24)


def noise_from(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Gumbel noise float32 [R, n] from int32 keys [R, 2] and token hashes [n] or [R, n]."""
    return uniform_from(keys, hashes).log_().neg_().log_().neg_()


def gumbel_noise(
    seeds: torch.Tensor, sample_index: torch.Tensor, positions: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Noise of every token, float32 [R, vocab_size], from int64 [R] each."""
    hashes = token_hash(torch.arange(vocab_size, device=seeds.device))
    return noise_from(row_keys(seeds, sample_index, positions), hashes)


def gumbel_noise_at(
    seeds: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """The same noise for chosen tokens only: float32 [R, n] for int64 token ids [R, n]."""
    return noise_from(row_keys(seeds, sample_index, positions), token_hash(token_ids))
