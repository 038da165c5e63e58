"""Chairlift's operators: Triton-lang kernels for GPUs, native operators for CPUs, and torch
references.

Importing this package imports neither torch nor triton; take the module you need, or `TritonOps`
from `chairlift_kernels.ops`.
"""

__version__ = "0.1.0"
