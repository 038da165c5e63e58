"""Copies between host and device that nobody waits for before they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class HostCopy:
    """A tensor on its way to the host; one that is there already is not copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once the device has got so far."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def to_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """On a GPU through page-locked memory: a copy from any other would wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_into(target: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """``to_device``, into memory that is there."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)
