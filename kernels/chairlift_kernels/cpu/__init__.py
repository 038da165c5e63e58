"""CPU operators in C++, compiled once with the machine's own compiler; ops.py lists them."""

from .build import CpuKernelsUnavailable, load_library
from .linear import Activation, PackedGateUp, PackedLinear
from .ops import CpuOps

__all__ = [
    "Activation",
    "CpuKernelsUnavailable",
    "CpuOps",
    "PackedGateUp",
    "PackedLinear",
    "load_library",
]
