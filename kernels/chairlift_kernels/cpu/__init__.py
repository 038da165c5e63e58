"""CPU operators in C++, compiled once with the machine's own compiler; ops.py lists them."""

from .build import CpuKernelsUnavailable, load_library
from .kv_cache import BlockContents, KvCache, LayerShape, bytes_per_block
from .linear import Activation, PackedGateUp, PackedLinear
from .ops import CpuOps

__all__ = [
    "Activation",
    "BlockContents",
    "CpuKernelsUnavailable",
    "CpuOps",
    "KvCache",
    "LayerShape",
    "PackedGateUp",
    "PackedLinear",
    "bytes_per_block",
    "load_library",
]
