"""The memory sum: weights, KV bytes per token, and how many blocks and requests fit.

The engine sizes its pool with these functions and reports their figures at start; plan.py
(`chairlift plan`) prints the same from a model's config alone, without weights and without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

GIB = 1 << 30
# A CPU shares its memory with everything else, so the default pool takes a modest part of what is
# available and never more than this: 4 GiB hold 93,000 tokens of SmolLM2 (45 KiB each).
CPU_POOL_FRACTION = 0.25
CPU_POOL_LIMIT = 4 * GIB


class KVShape(Protocol):
    """One attention layer's share of a token."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...


class PoolPlan(NamedTuple):
    """A sized KV pool. ``num_blocks`` includes the null block, ``num_tokens`` does not."""

    num_blocks: int
    block_size: int
    bytes_per_token: int

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_tokens(self) -> int:
        return self.num_usable_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.bytes_per_token

    def requests_of(self, num_tokens: int) -> int:
        """How many requests of ``num_tokens`` (prompt and output) fit at once without sharing."""
        return self.num_usable_blocks // -(-num_tokens // self.block_size)


def kv_bytes_per_token(layers: Sequence[KVShape], itemsize: int) -> int:
    """Keys and values of all layers for one token: sum of Hkv * (Dk + Dv) * itemsize."""
    return sum(la.num_kv_heads * (la.key_dim + la.value_dim) for la in layers) * itemsize


def size_pool(
    available_bytes: int, bytes_per_token: int, block_size: int, wanted_blocks: int | None
) -> PoolPlan:
    """As many blocks as fit into ``available_bytes``, or ``wanted_blocks`` if they fit.

    Raises ``ValueError`` with both numbers where they don't, or where not one block fits.
    """
    block_bytes = bytes_per_token * block_size
    fitting = available_bytes // block_bytes - 1
    if wanted_blocks is not None and wanted_blocks > fitting:
        raise ValueError(
            f"num_kv_blocks is {wanted_blocks} ({(wanted_blocks + 1) * block_bytes:,} bytes), but "
            f"{available_bytes:,} bytes are available for the KV cache"
        )
    usable = fitting if wanted_blocks is None else wanted_blocks
    if usable < 1:
        raise ValueError(
            f"the KV cache needs at least {2 * block_bytes:,} bytes (two blocks of {block_size} "
            f"tokens), but {max(0, available_bytes):,} are available"
        )
    return PoolPlan(usable + 1, block_size, bytes_per_token)


def cpu_pool_bytes(available_bytes: int, wanted_bytes: int | None) -> int:
    """The pool's bytes on a CPU: as set, else a safe part of what is available now."""
    if wanted_bytes is None:
        return min(int(available_bytes * CPU_POOL_FRACTION), CPU_POOL_LIMIT)
    if wanted_bytes > available_bytes:
        raise ValueError(
            f"kv_cache_memory_bytes is {wanted_bytes:,}, but only {available_bytes:,} bytes of "
            "memory are available"
        )
    return wanted_bytes


def gpu_pool_bytes(
    total_bytes: int, free_bytes: int, own_bytes: int, peak_step_bytes: int, utilization: float
) -> int:
    """What is left for the KV cache on a GPU.

    total * utilization - what others use - what we use already (weights) - the measured extra peak
    of the largest step (activations, logits, and graphs).
    """
    used_by_others = total_bytes - free_bytes - own_bytes
    return int(total_bytes * utilization) - used_by_others - own_bytes - peak_step_bytes


def step_bytes(
    num_tokens: int,
    num_rows: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    itemsize: int,
) -> int:
    """Estimated extra memory of one step, where it can't be measured.

    The widest moment of a layer holds, per token, the residual and its norm, q-k-v with the output
    of attention, and gate with up: about 6 hidden + 2 intermediate. Each row that samples holds its
    logits in float32 twice (raw, and edited).
    """
    per_token = (6 * hidden_size + 2 * intermediate_size) * itemsize
    return num_tokens * per_token + num_rows * vocab_size * 4 * 2
