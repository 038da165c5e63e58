"""Drawing tokens on a GPU: the same choice as draw.py's, in a few launches that nobody waits for.

draw.py looks on the host which rows their candidates sufficed for, so each of its calls waits for
the device; with a step ahead that would be in the middle of a launch. The kernels find each row's
threshold where the row is. Noise and filters are the same, so the tokens are too, up to the
rounding of the top_p sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .device_copies import to_device
from .gumbel import Place
from .request import SamplingParams


def draw_on_device(
    logits: torch.Tensor, params: Sequence[SamplingParams], places: Sequence[Place]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``draw``: token ids int64 [R] from float32 [R, V], and per row 0, or NaN if unusable."""
    from chairlift_kernels.sampling import sample

    device = logits.device
    settings = np.array([(p.temperature, p.top_p, p.min_p) for p in params], np.float32)
    temperature, top_p, min_p = to_device(np.ascontiguousarray(settings.T), device)
    top_k = to_device(np.array([p.top_k for p in params], np.int32), device)
    addresses = np.ascontiguousarray(np.array(places, np.int64).T)
    seeds, sample_indices, positions = to_device(addresses, device)
    token_ids, finite = sample(
        logits, temperature, top_k, top_p, min_p, seeds, sample_indices, positions
    )
    return token_ids, torch.where(finite, 0.0, torch.nan)
