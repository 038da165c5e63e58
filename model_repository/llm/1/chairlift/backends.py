"""Which kernels and which attention backend serve this device; falls back to torch and says so."""

from __future__ import annotations

import logging
import os
from typing import Any, NamedTuple

import torch

from chairlift_kernels.cpu import CpuKernelsUnavailable, CpuOps

from .attention import AttentionBackend
from .attention_kernels import KernelAttention, TritonAttention
from .attention_torch import TorchAttention
from .config import EngineConfig

logger = logging.getLogger(__name__)

CPU_BLOCK_MULTIPLE = 16
CPU_DTYPES = (torch.bfloat16, torch.float32)


class Kernels(NamedTuple):
    """Operators for a device, and the kind of backend that runs on them."""

    ops: Any
    kind: type[KernelAttention]


class NoKernels(Exception):
    """There are no kernels for this device, dtype, or setting; the message says why."""


def open_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The operators for ``device``, or None for plain torch.

    Raises ``ValueError`` where ``attention_backend`` names kernels that can't be had.
    """
    wanted = config.attention_backend
    if wanted == "torch":
        return None
    try:
        if wanted == "triton" or (wanted == "auto" and device.type == "cuda"):
            return _triton_kernels(device)
        return _cpu_kernels(config, device, dtype)
    except NoKernels as error:
        if wanted != "auto":
            raise ValueError(f"attention_backend is '{wanted}', but {error}") from None
        logger.warning("plain torch operators are used (slow): %s", error)
        return None


def _cpu_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type != "cpu":
        raise NoKernels(f"the C++ kernels run on a CPU, not on {device.type}")
    if dtype not in CPU_DTYPES:
        raise NoKernels(f"the CPU kernels compute in bfloat16 or float32, the model is {dtype}")
    if config.block_size % CPU_BLOCK_MULTIPLE:
        raise NoKernels(
            f"the CPU kernels need a block_size that is a multiple of {CPU_BLOCK_MULTIPLE}, "
            f"not {config.block_size}"
        )
    try:
        return Kernels(CpuOps(), KernelAttention)
    except CpuKernelsUnavailable as error:
        raise NoKernels(str(error)) from None


def _triton_kernels(device: torch.device) -> Kernels:
    """On a GPU, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1, for tests)."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise NoKernels(f"Triton-lang kernels need a GPU, not {device.type}")
    try:
        from chairlift_kernels.ops import TritonOps
    except ImportError as error:
        raise NoKernels(f"Triton-lang can't be imported: {error}") from None
    capability = None if device.type == "cuda" else (9, 0)
    return Kernels(TritonOps(device, capability), TritonAttention)


def make_backend(kernels: Kernels | None) -> AttentionBackend:
    return TorchAttention() if kernels is None else kernels.kind(kernels.ops)
