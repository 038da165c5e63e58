"""Compile every kernel specialisation for GPUs that need not be here, and tabulate the result.

    PYTHONPATH=kernels:. python perf/compile_matrix.py [--targets 80,89,90,100,120,gfx942]
                                                       [--core] [--only TEXT] [--out PATH]

--core compiles one case of each kind, for CI; --only those whose name holds the text. All cases
together, or any with --out, go to PATH.md and PATH.json. Ends with 1 where a kernel does not
compile, spills registers, needs more shared memory than the device has, or where the prefill shape
is without wgmma on sm_90.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import triton
from measuring.paths import RESULTS
from measuring.results import about, save, table
from triton.backends.compiler import GPUTarget

from chairlift_kernels.launch_table import Capability, supports_fp8
from chairlift_kernels.ops import TritonOps
from perf.kernel_cases import CORE, Case, all_cases
from perf.recorded_launches import Launch, recording

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Shared memory that one program may ask for, bytes (CUDA C++ programming guide, capabilities).
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376, 942: 65_536}
MATMUL = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync", "mfma": "v_mfma"}


class Row(NamedTuple):
    """One compiled specialisation; `fault` is empty where all is well."""

    target: str
    case: str
    kernel: str
    warps: int
    registers: int
    spilled: int
    shared: int
    matmul: str
    fault: str


def target_of(text: str) -> tuple[GPUTarget, int]:
    if text.startswith("gfx"):
        return GPUTarget("hip", text, 64), int(text[3:])
    return GPUTarget("cuda", int(text), 32), int(text)


def capability_of(target: str) -> Capability:
    number = target_of(target)[1]
    return divmod(number, 10) if number < 900 else (9, 4)


def measure(compiled: Any) -> tuple[int, int]:
    """Registers a thread, and instructions that spill to local memory."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
        spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
        return int(registers.group(1)), int(spilled.group(1))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
        spilled = len(re.findall(r"\bSTL\b", _dump("-sass", file.name))) if stack != "0" else 0
    return int(registers), spilled


def _dump(option: str, path: str) -> str:
    return subprocess.run(
        [str(CUOBJDUMP), option, path], capture_output=True, text=True, check=True
    ).stdout


def check(target: str, case: str, launch: Launch) -> Row:
    """Compile one specialisation and say what is wrong with it."""
    gpu, number = target_of(target)
    warps = dict(launch.options).get("num_warps", 4)
    try:
        compiled = launch.compile(gpu)
    except Exception as error:  # whatever the compiler raises is the finding
        reason = str(error).strip().splitlines() or [type(error).__name__]
        fault = f"does not compile: {reason[-1]}"
        return Row(target, case, launch.name, warps, 0, 0, 0, "", fault)
    registers, spilled = measure(compiled)
    code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    matmul = next((name for name, text in MATMUL.items() if text in code), "")
    faults = []
    if spilled:
        faults.append("spills")
    if compiled.metadata.shared > SHARED_LIMIT[number]:
        faults.append("too much shared memory")
    if target == "90" and case.startswith("prefill") and "fp32" not in case and matmul != "wgmma":
        faults.append("no wgmma")
    shared = compiled.metadata.shared
    return Row(
        target, case, launch.name, warps, registers, spilled, shared, matmul, ", ".join(faults)
    )


def run(targets: list[str], cases: dict[str, Case]) -> list[Row]:
    rows = []
    for target in targets:
        ops = TritonOps("cpu", capability=capability_of(target))
        seen: set[Launch] = set()
        for case, call in cases.items():
            if "e4m3" in case and not supports_fp8(ops.capability):
                continue
            with recording() as launches:
                call(ops)
            for launch in launches:
                if launch not in seen:
                    seen.add(launch)
                    rows.append(check(target, case, launch))
                    print(line(rows[-1]), flush=True)
    return rows


def name_of(target: str) -> str:
    return f"sm_{target}" if target.isdigit() else target


def line(row: Row) -> str:
    cells = (name_of(row.target), row.case, row.kernel.removesuffix("_kernel"), row.warps)
    rest = (row.spilled, f"{row.shared / 1024:.1f}", row.matmul, row.fault or "ok")
    return "| " + " | ".join(str(cell) for cell in (*cells, row.registers, *rest)) + " |"


HEADER = (
    "| target | case | kernel | warps | registers | spills | shared KiB | matmul | result |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def summary(targets: list[str], rows: list[Row]) -> list[str]:
    """Per target, what is wrong, and what each specialisation takes."""
    cells = []
    for target in targets:
        mine = [row for row in rows if row.target == target]
        prefill = {row.matmul for row in mine if row.case.startswith("prefill")} - {""}
        shared = max(row.shared for row in mine)
        spilled = sum(row.spilled > 0 for row in mine)
        faults = sum(row.fault != "" for row in mine)
        registers = max(row.registers for row in mine)
        limit = SHARED_LIMIT[target_of(target)[1]] >> 10
        cells.append([
            name_of(target), len(mine), faults, spilled, registers,
            f"{shared / 1024:.0f} of {limit}", ", ".join(sorted(prefill)),
        ])  # fmt: skip
    headings = ["target", "specialisations", "faults", "with spills", "most registers"]
    text = table([*headings, "most shared KiB", "matmul of prefill"], cells)
    older = [name_of(each) for each in targets if not supports_fp8(capability_of(each))]
    if older:
        text += ["", f"Without e4m3, which is refused at load there: {', '.join(older)}."]
    wrong = [f"- {name_of(r.target)}, {r.case}, {r.kernel}: {r.fault}" for r in rows if r.fault]
    return [
        *text,
        "",
        *(wrong or ["Nothing is wrong with any of them."]),
        "",
        *_whole(targets, rows),
    ]


def _whole(targets: list[str], rows: list[Row]) -> list[str]:
    """A line for each case and kernel: warps, registers, and KiB of shared memory per target."""
    lines = []
    by_kernel = sorted(rows, key=lambda row: (row.kernel, row.case))
    for (kernel, case), group in groupby(by_kernel, key=lambda row: (row.kernel, row.case)):
        found: dict[str, list[str]] = {}
        for row in group:
            text = f"{row.warps} / {row.registers} / {row.shared / 1024:.1f}"
            found.setdefault(row.target, []).append(text)
        numbers = ["<br>".join(found.get(target, [])) for target in targets]
        lines.append([kernel.removesuffix("_kernel"), case, *numbers])
    note = "Warps, registers of a thread, and KiB of shared memory; a kernel that an earlier case"
    return [
        f"{note} has asked for is not repeated.", "",
        *table(["kernel", "case", *map(name_of, targets)], lines),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="80,89,90,100,120,gfx942")
    parser.add_argument("--core", action="store_true", help="one case of each kind, for CI")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    parser.add_argument("--out", type=Path, help="without an ending")
    options = parser.parse_args()
    targets = options.targets.split(",")
    cases = {
        name: case
        for name, case in all_cases().items()
        if options.only in name and (not options.core or name in CORE)
    }
    print(HEADER)
    rows = run(targets, cases)
    whole = not options.core and not options.only
    out = options.out or (RESULTS / "compile_matrix" if whole else None)
    if out is not None:
        data = [row._asdict() for row in rows]
        title = "Every kernel specialisation, compiled without a GPU"
        save(out, title, about(), data, summary(targets, rows))
    faults = [row for row in rows if row.fault]
    print(f"{len(rows)} specialisations, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
