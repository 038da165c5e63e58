"""The CPU operators against torch's own, with the memory's read bandwidth measured in the same run.

python perf/cpu_ops.py [--rounds 7] [--only linear] [--variant native]

Shapes are those of SmolLM2-135M. Weights and KV rotate through more memory than most caches hold,
as they do in a forward pass. Ours, torch's and the read ceiling are timed in turn in every
round and their medians shown: shared machines drift by tens of percent within seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from chairlift_kernels.cpu import CpuOps, LayerShape

ROTATION_BYTES = 320e6  # more than the weights of the model, and than most last-level caches
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 576, 9, 3, 64, 1536, 49152


class Case(NamedTuple):
    """One operator at one size; `ours` and `torch` pick their operands by the turn's number."""

    name: str
    bytes_read: float
    flops: float
    ours: Callable[[int], object]
    torch: Callable[[int], object]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def linear_cases(ops: CpuOps) -> Iterator[Case]:
    """The four products of a layer, and the head."""
    shapes = {
        "qkv": (960, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "down": (HIDDEN, INNER),
        "head": (VOCABULARY, HIDDEN),
    }
    for name, (n, k) in shapes.items():
        copies = max(2, int(ROTATION_BYTES / (2 * n * k)))
        weights = [random(n, k) / k**0.5 for _ in range(copies)]
        packed = [ops.pack_linear(weight) for weight in weights]
        for rows in (1, 8, 32, 64) if name == "head" else (1, 8, 32, 64, 128, 512):
            x = random(rows, k)
            yield Case(
                f"linear {name} {k}->{n} x{rows}",
                2 * n * k,
                2 * rows * n * k,
                lambda turn, x=x, packed=packed: ops.linear(x, packed[turn % len(packed)]),
                lambda turn, x=x, weights=weights: functional.linear(
                    x, weights[turn % len(weights)]
                ),
            )


def gate_up_cases(ops: CpuOps) -> Iterator[Case]:
    """The gated MLP's first half, against one concatenated matmul and torch's activation."""
    copies = int(ROTATION_BYTES / (4 * INNER * HIDDEN))
    weights = [random(2 * INNER, HIDDEN) / HIDDEN**0.5 for _ in range(copies)]
    packed = [ops.pack_gate_up(*weight.split(INNER)) for weight in weights]

    def plain(turn: int, x: Tensor) -> Tensor:
        gate, up = functional.linear(x, weights[turn % copies]).split(INNER, -1)
        return functional.silu(gate) * up

    for rows in (1, 8, 32, 64, 128, 512):
        x = random(rows, HIDDEN)
        yield Case(
            f"gate_up x{rows}",
            4 * INNER * HIDDEN,
            4 * rows * INNER * HIDDEN,
            lambda turn, x=x: ops.gate_up(x, packed[turn % copies], "silu"),
            lambda turn, x=x: plain(turn, x),
        )


def attention_cases(ops: CpuOps) -> Iterator[Case]:
    """Paged attention, against SDPA on keys and values that somebody has already gathered."""
    for name, sequences, new, total in (
        ("decode", 1, 1, 1500),
        ("decode", 8, 1, 1500),
        ("decode", 64, 1, 200),
        ("prefill", 4, 200, 200),
        ("prefill", 1, 1500, 1500),
    ):
        bytes_read = 4 * KV_HEADS * DIM * sequences * total
        layers = max(1, int(min(ROTATION_BYTES / 4, 40 * bytes_read) / bytes_read))
        pages = -(-total // 32)
        shape = LayerShape(KV_HEADS, DIM, DIM)
        cache = ops.allocate_cache([shape] * layers, sequences * pages, 32)
        for layer in cache.layers:
            layer.copy_(random(layer.shape[1]).expand_as(layer))
        tables = torch.randperm(sequences * pages).int().view(sequences, pages)
        starts = torch.arange(sequences + 1).int() * new
        lengths = torch.full((sequences,), total).int()
        q = random(sequences * new, HEADS, DIM)
        gathered = [random(2, sequences, KV_HEADS, total, DIM) for _ in range(layers)]

        def paged(
            turn: int, q=q, cache=cache, tables=tables, starts=starts, lengths=lengths
        ) -> Tensor:
            layer = turn % len(cache.layers)
            return ops.attend(q, cache, layer, tables, starts, lengths, scale=DIM**-0.5)

        def plain(turn: int, q=q, gathered=gathered, new=new, sequences=sequences) -> Tensor:
            keys, values = gathered[turn % len(gathered)]
            rows = q.view(sequences, new, HEADS, DIM).transpose(1, 2)
            return functional.scaled_dot_product_attention(
                rows, keys, values, is_causal=new > 1, enable_gqa=True
            )

        pairs = new * (total - new) + new * (new + 1) / 2
        flops = 4 * DIM * HEADS * sequences * pairs
        yield Case(f"attend {name} {sequences} x {total}", bytes_read, flops, paged, plain)


def small_cases(ops: CpuOps) -> Iterator[Case]:
    """Norm, activation and rotary embedding."""
    weight = random(HIDDEN)
    cache = ops.allocate_cache([LayerShape(KV_HEADS, DIM, DIM)], 64)
    for rows in (1, 64, 512):
        x, stream = random(rows, HIDDEN), random(rows, HIDDEN)
        gate_up, qkv = random(rows, 2 * INNER), random(rows, (HEADS + 2 * KV_HEADS) * DIM)
        cos, sin, slots = random(rows, DIM), random(rows, DIM), torch.arange(rows)

        def norm(turn: int, x=x, stream=stream) -> Tensor:
            return ops.rms_norm(x, weight, 1e-5, residual=stream)

        def plain_norm(turn: int, x=x, stream=stream) -> Tensor:
            return functional.rms_norm(stream.add_(x), (HIDDEN,), weight, 1e-5)

        def gate(turn: int, gate_up=gate_up) -> Tensor:
            return ops.gated_activation(gate_up, "silu")

        def plain_gate(turn: int, gate_up=gate_up) -> Tensor:
            left, right = gate_up.split(INNER, -1)
            return functional.silu(left) * right

        def rope(turn: int, qkv=qkv, cos=cos, sin=sin, slots=slots) -> Tensor:
            return ops.rope_and_cache(qkv, cos, sin, cache, 0, slots, num_heads=HEADS)

        def plain_rope(turn: int, qkv=qkv, cos=cos, sin=sin) -> Tensor:
            heads = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)[:, : HEADS + KV_HEADS]
            first, second = heads.chunk(2, -1)
            return heads * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

        yield Case(f"rms_norm + residual x{rows}", 8 * x.numel(), 5 * x.numel(), norm, plain_norm)
        yield Case(
            f"gated activation x{rows}",
            3 * gate_up.numel(),
            8 * gate_up.numel(),
            gate,
            plain_gate,
        )
        yield Case(f"rope + cache x{rows}", 4 * qkv.numel(), 4 * qkv.numel(), rope, plain_rope)


def seconds(call: Callable[[int], object], turns: int) -> float:
    begin = time.perf_counter()
    for turn in range(turns):
        call(turn)
    return (time.perf_counter() - begin) / turns


def measure(case: Case, ceiling: Callable[[int], object], rounds: int) -> tuple[float, ...]:
    """Median seconds of ours, torch's and the ceiling's read, taken in turn."""
    turns = max(2, int(0.05 / max(seconds(case.ours, 2), 1e-6)))
    samples = [
        (seconds(case.ours, turns), seconds(case.torch, turns), seconds(ceiling, 1))
        for _ in range(rounds)
    ]
    return tuple(statistics.median(column) for column in zip(*samples, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--variant", default="native", help="instruction path (cpu/build.py)")
    arguments = parser.parse_args()
    ops = CpuOps(arguments.variant)
    memory = torch.ones(int(ROTATION_BYTES / 8), dtype=torch.int64)
    print(f"{ops.instructions}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'operator':32}{'us':>9}{'GB/s':>7}{'GFLOP/s':>9}{'torch us':>10}{'x':>6}{'read':>7}")
    for cases in (linear_cases, gate_up_cases, attention_cases, small_cases):
        for case in cases(ops):
            if arguments.only not in case.name:
                continue
            with torch.inference_mode():
                ours, plain, read = measure(case, lambda turn: memory.sum(), arguments.rounds)
            print(
                f"{case.name:32}{ours * 1e6:9.0f}{case.bytes_read / ours / 1e9:7.1f}"
                f"{case.flops / ours / 1e9:9.0f}{plain * 1e6:10.0f}{plain / ours:6.2f}"
                f"{memory.nbytes / read / 1e9:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
