"""Memory for packed weights that the processor reads at full speed."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

# Larger than any block that glibc's malloc keeps for reuse (32 MB): each chunk is fresh from the
# kernel, and its pages can still become large ones. What is not handed out is never touched.
_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Hands out bf16 vectors that lie one after the other on 2 MB pages.

    A decode step reads every weight once. On 4 KB pages two threads read 25 GB/s of a virtual
    machine's memory, on 2 MB pages 34; one weight of a small model is too short for such a page.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.bfloat16)

    def zeros(self, count: int) -> Tensor:
        """[count] bf16 zeros at the start of a cache line."""
        padded = math.ceil(count * 2 / _ALIGNMENT) * _ALIGNMENT // 2
        if padded > len(self._chunk):
            self._chunk = torch.empty(max(padded, _CHUNK_BYTES // 2), dtype=torch.bfloat16)
            self._library.chairlift_prefer_huge_pages(self._chunk.data_ptr(), self._chunk.nbytes)
        taken, self._chunk = self._chunk[:count], self._chunk[padded:]
        return taken.zero_()
