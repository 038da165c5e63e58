"""Calls that between them ask for every kernel and specialisation worth compiling.

The tensors are small and hold nothing: shapes, types and options are what matters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from chairlift_kernels import logprobs, penalties, sampling
from chairlift_kernels.kv_cache import FP8
from chairlift_kernels.ops import TritonOps

BLOCK = 32
Case = Callable[[TritonOps], object]


class AttentionCase(NamedTuple):
    """One attention layer: heads, KV heads, head sizes, cache type, options."""

    heads: int = 8
    kv_heads: int = 2
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


ATTENTION = {
    "D 64": AttentionCase(key_dim=64, value_dim=64),
    "D 128": AttentionCase(),
    "D 256": AttentionCase(key_dim=256, value_dim=256),
    "D 80, G 7": AttentionCase(heads=7, kv_heads=1, key_dim=80, value_dim=80),
    "D 128, Dv 64": AttentionCase(value_dim=64),
    "D 128, G 32": AttentionCase(heads=32, kv_heads=1),
    "D 128, G 48": AttentionCase(heads=48, kv_heads=1),
    "D 128, window": AttentionCase(window=4096),
    "D 256, window": AttentionCase(key_dim=256, value_dim=256, window=512),
    "D 256, window, softcap": AttentionCase(key_dim=256, value_dim=256, window=4096, softcap=50.0),
    "D 64, window, sinks": AttentionCase(key_dim=64, value_dim=64, window=128, sinks=True),
    "D 128, e4m3": AttentionCase(cache_dtype=FP8),
    "D 64, e4m3": AttentionCase(key_dim=64, value_dim=64, cache_dtype=FP8),
    "D 256, e4m3": AttentionCase(key_dim=256, value_dim=256, cache_dtype=FP8),
    "D 128, fp32": AttentionCase(dtype=torch.float32),
}


# One case of each kind: what CI compiles.
CORE = {
    "decode, D 64", "decode in splits, D 128", "prefill, D 128", "prefill, D 80, G 7",
    "prefill, D 64, window, sinks", "decode in splits, D 256, window, softcap",
    "prefill, D 256, window, softcap", "prefill, D 128, e4m3", "decode in splits, D 128, e4m3",
    "rope, norms", "rope, e4m3", "rms_norm 4096, residual", "silu", "cache", "sample bf16",
    "penalties",
}  # fmt: skip


def _attend(
    case: AttentionCase, ops: TritonOps, *, queries: tuple[int, ...], max_seq_len: int
) -> None:
    cache = ops.allocate_cache(
        [(case.kv_heads, case.key_dim, case.value_dim)], 4, BLOCK, case.cache_dtype or case.dtype
    )
    starts = torch.tensor((0, *queries), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    rows = len(queries)
    ops.attend(
        torch.empty(sum(queries), case.heads, case.key_dim, dtype=case.dtype),
        cache, 0,
        torch.zeros(rows, 2, dtype=torch.int32), starts, torch.zeros(rows, dtype=torch.int32),
        num_decodes=queries.count(1), max_query_len=max(queries), max_seq_len=max_seq_len,
        scale=case.key_dim**-0.5, window=case.window, softcap=case.softcap,
        sinks=torch.empty(case.heads, dtype=case.dtype) if case.sinks else None,
    )  # fmt: skip


def _rope(
    ops: TritonOps, *, key_dim: int, turned: int, cache_dtype: torch.dtype, norm: bool, unit: bool
) -> None:
    cache = ops.allocate_cache([(2, key_dim, key_dim)], 4, BLOCK, cache_dtype)
    weight = torch.empty(key_dim, dtype=torch.bfloat16) if norm else None
    angles = torch.empty(3, turned, dtype=torch.bfloat16)
    ops.rope_and_cache(
        torch.empty(3, 12 * key_dim, dtype=torch.bfloat16), angles, angles, cache, 0,
        torch.zeros(3, dtype=torch.int64), num_heads=8, q_norm=weight, k_norm=weight,
        unit_offset=unit,
    )  # fmt: skip


def _norm(ops: TritonOps, *, size: int, residual: bool, unit: bool) -> None:
    x = torch.empty(3, size, dtype=torch.bfloat16)
    rest = torch.empty_like(x) if residual else None
    ops.rms_norm(x, x[0], 1e-6, residual=rest, unit_offset=unit)


def _sample(ops: TritonOps, *, dtype: torch.dtype) -> None:
    logits = torch.empty(3, 151_936, dtype=dtype)
    real, whole = torch.empty(3), torch.zeros(3, dtype=torch.int64)
    sampling.sample(logits, real, whole.int(), real, real, whole, whole, whole)
    logprobs.logprobs(logits, whole, 5)


def _penalties(ops: TritonOps) -> None:
    asked = torch.zeros(4, 151_936, dtype=torch.uint8)
    real = torch.empty(3)
    slots = torch.zeros(3, dtype=torch.int64)
    given = asked.int()
    penalties.apply_penalties(torch.empty(3, 151_936), asked, given, slots, real, real, real)


def _cache(ops: TritonOps, *, dtype: torch.dtype) -> None:
    cache = ops.allocate_cache([(2, 128, 128)], 4, BLOCK, dtype)
    x = torch.empty(3, 2, 128, dtype=torch.bfloat16)
    cache.write(0, x, x, torch.zeros(3, dtype=torch.int64))
    cache.copy_blocks([(0, 1)])


def all_cases() -> dict[str, Case]:
    """Calls by name; a name that says e4m3 needs a device that has it."""
    cases: dict[str, Case] = {}
    for name, case in ATTENTION.items():
        attend = partial(_attend, case)
        cases[f"decode, {name}"] = partial(attend, queries=(1, 1), max_seq_len=512)
        cases[f"decode in splits, {name}"] = partial(attend, queries=(1, 1), max_seq_len=8192)
        cases[f"prefill, {name}"] = partial(attend, queries=(300, 20), max_seq_len=8192)
    bf16 = torch.bfloat16
    rope = partial(_rope, key_dim=128, turned=128, cache_dtype=bf16, norm=False, unit=False)
    cases |= {
        "rope": rope,
        "rope, norms": partial(rope, norm=True),
        "rope, norms (1 + w), D 256": partial(rope, key_dim=256, turned=256, norm=True, unit=True),
        "rope of 32 of 80": partial(rope, key_dim=80, turned=32),
        "rope, e4m3": partial(rope, cache_dtype=FP8),
        "rms_norm 4096": partial(_norm, size=4096, residual=False, unit=False),
        "rms_norm 4096, residual": partial(_norm, size=4096, residual=True, unit=False),
        "rms_norm 2304 (1 + w), residual": partial(_norm, size=2304, residual=True, unit=True),
        "rms_norm 16384, residual": partial(_norm, size=16_384, residual=True, unit=False),
        "cache": partial(_cache, dtype=bf16),
        "cache, e4m3": partial(_cache, dtype=FP8),
        "sample fp32": partial(_sample, dtype=torch.float32),
        "sample bf16": partial(_sample, dtype=bf16),
        "penalties": _penalties,
    }
    for activation in ("silu", "gelu_tanh", "gelu"):
        gate_up = torch.empty(3, 8192, dtype=bf16)
        cases[activation] = partial(
            TritonOps.gated_activation, gate_up=gate_up, activation=activation
        )
    return cases
