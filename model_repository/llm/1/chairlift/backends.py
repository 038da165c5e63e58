"""Which kernels and which attention backend serve this device; falls back to torch and says so."""

from __future__ import annotations

import logging
from typing import Any

import torch

from chairlift_kernels.cpu import CpuKernelsUnavailable, CpuOps

from .attention import AttentionBackend
from .attention_cpu import CpuAttention
from .attention_torch import TorchAttention
from .config import EngineConfig

logger = logging.getLogger(__name__)

CPU_BLOCK_MULTIPLE = 16
CPU_DTYPES = (torch.bfloat16, torch.float32)


def open_kernels(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> Any | None:
    """The operators for ``device``, or None for plain torch.

    Raises ``ValueError`` where ``attention_backend`` names kernels that can't be had.
    """
    wanted = config.attention_backend
    if wanted == "torch":
        return None
    if device.type != "cpu":
        reason = f"there are no kernels for {device.type} yet"
    elif dtype not in CPU_DTYPES:
        reason = f"the CPU kernels compute in bfloat16 or float32, the model is {dtype}"
    elif config.block_size % CPU_BLOCK_MULTIPLE:
        reason = (
            f"the CPU kernels need a block_size that is a multiple of {CPU_BLOCK_MULTIPLE}, "
            f"not {config.block_size}"
        )
    else:
        try:
            return CpuOps()
        except CpuKernelsUnavailable as error:
            reason = str(error)
    if wanted != "auto":
        raise ValueError(f"attention_backend is '{wanted}', but {reason}")
    logger.warning("plain torch operators are used (slow): %s", reason)
    return None


def make_backend(kernels: Any | None) -> AttentionBackend:
    return TorchAttention() if kernels is None else CpuAttention(kernels)
