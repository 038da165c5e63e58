"""Finds address arithmetic of 32 bits in the kernels' Triton IR; run outside the interpreter.

Two kinds are looked for in the inlined IR of every specialisation: a product with a stride that is
not 64 bits wide, and an index that was loaded from a table (block ids, slots, query starts, pairs)
and reaches the address of a float tensor in fewer than 64 bits. Prints one JSON object by kernel.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

from chairlift_kernels.ops import TritonOps
from perf.kernel_cases import all_cases
from perf.recorded_launches import Launch, recording

_SAME = ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape")


class Found(NamedTuple):
    """Lines of the IR that were looked at, and those of 32 bits."""

    checked: int
    narrow: list[str]


@triton.jit
def narrow_kernel(cache_ptr, table, out_ptr, stride_block):
    """What must be found: a block id times a stride in 32 bits."""
    tl.store(out_ptr, tl.load(cache_ptr + tl.load(table) * stride_block))


def inlined_ir(launch: Launch) -> str:
    """Triton IR after inlining, as every back end gets it."""
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(launch.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source: Any = launch.source()
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options),
        backend.get_module_map(), context,
    )  # fmt: skip
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


def examine(text: str) -> Found:
    """Follow strides and loaded indices through one function, line by line."""
    arguments = dict(re.findall(r"%(\w+): ([^ ,)]+)", text[: text.index("attributes")]))
    strides = {name for name in arguments if name.startswith("stride")}
    loaded: set[str] = set()
    bases = {name: name for name, kind in arguments.items() if kind.startswith("!tt.ptr")}
    checked, narrow = 0, []
    for line in text.splitlines():
        match = re.match(r"\s*%(\w+)(?::\d+)? = ([\w.]+) (.*)", line.split(" loc(")[0])
        if match is None:
            continue
        name, operation, rest = match.groups()
        operands = re.findall(r"%(\w+)", rest)
        first = operands[0] if operands else ""
        if operation in _SAME and first in strides:
            strides.add(name)
        if first in bases and operation in (*_SAME, "tt.addptr"):
            bases[name] = bases[first]
        from_table = first in bases and "ptr<i" in arguments[bases[first]]
        if (operation == "tt.load" and from_table) or loaded.intersection(operands):
            loaded.add(name)
        product = operation == "arith.muli" and strides.intersection(operands)
        address = operation == "tt.addptr" and operands[1] in loaded and not from_table
        if product or address:
            checked += 1
            if "i64" not in rest.rsplit(" : ", 1)[1].split(",")[-1]:
                narrow.append(line.strip())
    return Found(checked, narrow)


def examine_all() -> dict[str, Found]:
    """Findings for every kernel over all its cases, and for the one that is wrong on purpose."""
    found: dict[str, Found] = defaultdict(lambda: Found(0, []))
    for case in all_cases().values():
        with recording() as launches:
            case(TritonOps("cpu", capability=(9, 0)))
            table = torch.zeros(1, dtype=torch.int32)
            narrow_kernel[(1,)](torch.empty(1), table, torch.empty(1), 4096)
        for launch in dict.fromkeys(launches):
            before, now = found[launch.name], examine(inlined_ir(launch))
            found[launch.name] = Found(before.checked + now.checked, before.narrow + now.narrow)
    return found


if __name__ == "__main__":
    print(json.dumps({name: found._asdict() for name, found in examine_all().items()}))
