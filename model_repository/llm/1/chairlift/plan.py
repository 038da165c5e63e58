"""How many requests fit: weights, KV bytes per token, and pool size from a model's config alone.

`chairlift plan` runs this as a script of the model directory (``python -m chairlift.plan``). It
needs neither weights nor a GPU: the model is built on torch's meta device to count its parameters.
The engine sizes its pool with the same functions of memory.py and reports the same at start.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from .attention import LayerShape
from .memory import (
    GIB,
    PoolPlan,
    cpu_pool_bytes,
    gpu_pool_bytes,
    kv_bytes_per_token,
    size_pool,
    step_bytes,
)

# Memory that the driver reports, in GiB.
GPUS = {
    "a10": 22.5,
    "a100-40": 39.4,
    "a100-80": 79.2,
    "b200": 178.4,
    "h100": 79.2,
    "h200": 139.7,
    "l4": 22.2,
    "l40s": 44.4,
    "rtx4090": 23.6,
    "rtx5090": 31.4,
    "t4": 14.6,
}
LENGTHS = (512, 2048, 8192)


class ModelFigures(NamedTuple):
    """What a config says of memory; sizes in bytes."""

    weights: int
    layers: list[LayerShape]
    itemsize: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int


def model_figures(name: str, dtype: str | None, trust_remote_code: bool = False) -> ModelFigures:
    """Read a config (hub id or folder) and count; raises ``ValueError`` where it names no dtype."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    text = config.get_text_config(decoder=True)
    torch_dtype = getattr(torch, dtype) if dtype else (config.dtype or torch.bfloat16)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)  # type: ignore[no-untyped-call]
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return ModelFigures(
        weights=weights,
        layers=layer_shapes(text),
        itemsize=torch_dtype.itemsize,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocab_size=text.vocab_size,
    )


def layer_shapes(text_config: Any) -> list[LayerShape]:
    """Per attention layer: KV heads and head sizes, as transformers' configs name them."""
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
    return [LayerShape(kv_heads, head_dim, head_dim)] * text_config.num_hidden_layers


class Plan(NamedTuple):
    """A pool on one device, and what it is taken from."""

    figures: ModelFigures
    device_bytes: int
    step_bytes: int
    bytes_per_token: int
    pool: PoolPlan


def make_plan(
    figures: ModelFigures,
    device_bytes: int,
    *,
    on_cpu: bool,
    utilization: float,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> Plan:
    """Size the pool as the engine would on a device with ``device_bytes`` that nobody else uses.

    Raises ``ValueError`` with the numbers where not even two blocks fit.
    """
    per_token = kv_bytes_per_token(figures.layers, figures.itemsize)
    peak = step_bytes(
        max_num_batched_tokens,
        max_num_seqs,
        figures.hidden_size,
        figures.intermediate_size,
        figures.vocab_size,
        figures.itemsize,
    )
    if on_cpu:
        available = cpu_pool_bytes(device_bytes - figures.weights - peak, None)
    else:
        available = gpu_pool_bytes(
            device_bytes, device_bytes - figures.weights, figures.weights, peak, utilization
        )
    return Plan(
        figures, device_bytes, peak, per_token, size_pool(available, per_token, block_size, None)
    )


def parse_memory(text: str) -> int:
    """``80GiB``, ``24GB``, or bytes."""
    units = {"gib": GIB, "mib": 1 << 20, "gb": 10**9, "mb": 10**6, "g": GIB, "m": 1 << 20}
    lowered = text.strip().lower()
    for suffix, factor in units.items():
        if lowered.endswith(suffix):
            return int(float(lowered.removesuffix(suffix)) * factor)
    return int(lowered)


def describe(plan: Plan, lengths: Sequence[int]) -> dict[str, Any]:
    """The plan as plain numbers, in the order in which they are printed."""
    pool = plan.pool
    return {
        "device_bytes": plan.device_bytes,
        "weight_bytes": plan.figures.weights,
        "largest_step_bytes_estimated": plan.step_bytes,
        "kv_bytes_per_token": plan.bytes_per_token,
        "kv_pool_bytes": pool.num_bytes,
        "kv_blocks": pool.num_usable_blocks,
        "block_size": pool.block_size,
        "kv_tokens": pool.num_tokens,
        "requests_that_fit": {str(length): pool.requests_of(length) for length in lengths},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        figures = model_figures(args.model, args.dtype, args.trust_remote_code)
        device = args.memory or int(GPUS[args.gpu] * GIB)
        plan = make_plan(
            figures,
            device,
            on_cpu=args.cpu,
            utilization=args.gpu_memory_utilization,
            block_size=args.block_size,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_num_seqs=args.max_num_seqs,
        )
    except (ValueError, OSError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    described = describe(plan, args.lengths)
    print(json.dumps(described, indent=2) if args.json else _table(described))
    return 0


def _table(described: dict[str, Any]) -> str:
    lines = []
    for name, value in described.items():
        if isinstance(value, dict):
            lines += [
                f"{'requests of ' + length + ' tokens':<32}{count:>16,}"
                for length, count in value.items()
            ]
        else:
            shown = f"{value / GIB:,.2f} GiB" if value >= GIB else f"{value:,}"
            lines.append(f"{name.replace('_', ' '):<32}{shown:>16}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="chairlift plan", description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="hub id or folder; only its config is read")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", choices=sorted(GPUS), help="a GPU by name")
    where.add_argument("--memory", type=parse_memory, help="device memory, as 80GiB")
    parser.add_argument("--cpu", action="store_true", help="--memory is a CPU's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
