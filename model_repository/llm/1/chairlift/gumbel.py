"""Noise that a request carries with it: a function of its seed, its place and the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from chairlift_kernels.noise import M1, M2, MASK, START_0, START_1, noise_from, token_hash


class Place(NamedTuple):
    """What addresses the noise of one row; ``seed`` has 64 bits, the others 32."""

    seed: int
    sample_index: int
    position: int


class Noise(Protocol):
    """Gumbel noise by place and token; ``keys`` makes of the places what the others take."""

    def keys(self, places: Sequence[Place]) -> torch.Tensor:
        """[R, ...] on the device."""

    def at(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 [R, n] for int64 ids [R, n]."""

    def everywhere(self, keys: torch.Tensor) -> torch.Tensor:
        """float32 [R, V], a new tensor."""


class GumbelNoise:
    """The noise of chairlift_kernels with the hashes of a vocabulary kept (0.5 ms to make)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._hashes = token_hash(torch.arange(vocab_size, device=device))

    def keys(self, places: Sequence[Place]) -> torch.Tensor:
        """``row_keys`` on the host: as 120 torch operators it takes 0.5 ms, so 0.05 ms."""
        words = np.array(
            [(p.seed & MASK, p.seed >> 32 & MASK, p.sample_index, p.position) for p in places],
            np.uint32,
        )
        state = np.array([[START_0, START_1]], np.uint32)
        for word in words.T[:, :, None]:
            state = _mixed((state * np.uint32(5)) ^ word)
        return torch.from_numpy(state.view(np.int32)).to(self._hashes.device)

    def at(self, keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        # Columns past the vocabulary, at -inf, can be among the candidates of a small one.
        return noise_from(keys, self._hashes[token_ids.clamp(max=len(self._hashes) - 1)])

    def everywhere(self, keys: torch.Tensor) -> torch.Tensor:
        return noise_from(keys, self._hashes)


def _mixed(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(M1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(M2)
    return x ^ (x >> np.uint32(16))
