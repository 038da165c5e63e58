"""Sampling and the small kernels: time, and bytes moved against a copy."""

from __future__ import annotations

import torch

from chairlift_kernels.logprobs import logprobs
from chairlift_kernels.ops import TritonOps
from chairlift_kernels.penalties import apply_penalties
from chairlift_kernels.sampling import sample
from perf.gpu.timing import Bench, Call, Ceilings, Table

VOCABULARY = 151_936


def _torch_top_p(logits: torch.Tensor) -> torch.Tensor:
    """What sampling with a sort takes, for comparison: top-p 0.95 at temperature 1."""
    ordered, index = logits.softmax(-1).sort(dim=-1, descending=True)
    ordered[ordered.cumsum(-1) - ordered > 0.95] = 0
    drawn = (ordered / torch.empty_like(ordered).exponential_()).argmax(-1, keepdim=True)
    return index.gather(1, drawn)


def _sampling_calls(bench: Bench, rows: int, size: int) -> dict[str, Call]:
    logits = 3 * torch.randn(rows, size, device=bench.device)
    place = torch.arange(rows, device=bench.device)
    off, none = torch.ones(rows, device=bench.device), torch.zeros(rows, device=bench.device)
    whole = place.int() * 0
    counts = torch.zeros(rows, size, dtype=torch.int32, device=bench.device)
    return {
        "greedy": lambda: sample(logits, none, whole, off, none, place, place, place),
        "temperature": lambda: sample(logits, off, whole, off, none, place, place, place),
        "top-p 0.95": lambda: sample(logits, off, whole, off * 0.95, none, place, place, place),
        "top-k 50": lambda: sample(logits, off, whole + 50, off, none, place, place, place),
        "top-k 50, top-p 0.95": lambda: sample(
            logits, off, whole + 50, off * 0.95, none, place, place, place
        ),
        "penalties": lambda: apply_penalties(logits, counts, counts, place, off * 1.1, none, none),
        "5 log-probabilities": lambda: logprobs(logits, place, 5),
        "torch, top-p 0.95 by sort": lambda: _torch_top_p(logits),
    }


def sampling_table(bench: Bench) -> Table:
    size = bench.pick(VOCABULARY, 300)
    rows = []
    for batch in (2,) if bench.smoke else (1, 8, 64, 256):
        for name, call in _sampling_calls(bench, batch, size).items():
            seconds = bench.seconds([call])
            rows.append({"rows": batch, "what": name, "us": round(seconds * 1e6, 1)})
    return Table("Sampling", f"{size:,} tokens of vocabulary, fp32 logits", rows)


def _layer_calls(bench: Bench, ops: TritonOps, tokens: int) -> dict[str, tuple[Call, int]]:
    """Calls of an 8B shape, with the bytes each has to move."""
    dtype = torch.float16 if bench.smoke else torch.bfloat16
    hidden, inner = bench.pick(4096, 128), bench.pick(14_336, 256)
    x, residual = (torch.randn(tokens, hidden, device=bench.device).to(dtype) for _ in range(2))
    gate_up = torch.randn(tokens, 2 * inner, device=bench.device).to(dtype)
    qkv = torch.randn(tokens, 48 * 128, device=bench.device).to(dtype)
    angles = torch.randn(tokens, 128, device=bench.device).to(dtype)
    cache = ops.allocate_cache([(8, 128, 128)], tokens // 16 + 1, 16, dtype)
    slots = torch.arange(tokens, device=bench.device)
    return {
        "rms_norm": (lambda: ops.rms_norm(x, x[0], 1e-6), 2 * x.nbytes),
        "rms_norm, residual": (
            lambda: ops.rms_norm(x, x[0], 1e-6, residual=residual), 4 * x.nbytes,
        ),
        "silu": (lambda: ops.gated_activation(gate_up, "silu"), gate_up.nbytes * 3 // 2),
        "rope and cache": (
            lambda: ops.rope_and_cache(qkv, angles, angles, cache, 0, slots, num_heads=32),
            2 * qkv.nbytes + 2 * angles.nbytes,
        ),
    }  # fmt: skip


def layer_table(bench: Bench, ops: TritonOps, ceilings: Ceilings) -> Table:
    rows = []
    for tokens in (3,) if bench.smoke else (1, 64, 2048, 16_384):
        for name, (call, moved) in _layer_calls(bench, ops, tokens).items():
            seconds = bench.seconds([call])
            rate = moved / seconds / 1e9
            rows.append({
                "tokens": tokens, "what": name, "us": round(seconds * 1e6, 1),
                "GB/s": round(rate), "of copy": rate / ceilings.copy_gb_s,
            })  # fmt: skip
    note = "8B shape: 4,096 wide, 14,336 inside, 32 + 16 heads of 128; small ones stay in the L2"
    return Table("Norm, activation, rotation", note, rows)
