"""Stands in for a CUDA graph where there is no GPU: replays a call on the buffers it was given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class ReplayedCall:
    """Calls again at each replay, and writes the result where the first one was."""

    def __init__(self, call: Callable[[], Tensor]) -> None:
        self._call = call
        self.output = call()
        self.num_replays = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.num_replays += 1
        self.output.copy_(self._call())


class Recorder:
    """A way to capture that remembers what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[ReplayedCall] = []

    def __call__(self, call: Callable[[], Tensor]) -> ReplayedCall:
        self.calls.append(ReplayedCall(call))
        return self.calls[-1]

    @property
    def num_replays(self) -> int:
        return sum(call.num_replays for call in self.calls)
