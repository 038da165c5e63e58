"""Log-probabilities on a GPU: the same reports as logprobs.py's, in three launches and one wait.

logprobs.py looks on the host which rows its candidates did not suffice for, and sorts where many
tokens are equal; the kernels need neither, nor a float32 copy of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device_copies import HostCopy
from .request import TokenLogprobs

# Memory that is aligned otherwise would need kernels that were compiled for it.
ALIGNMENT = 16


def token_logprobs_on_device(
    logits: torch.Tensor, chosen: torch.Tensor, top_n: Sequence[int]
) -> list[TokenLogprobs]:
    """As ``token_logprobs``, from [R, V] in any float type."""
    from chairlift_kernels.logprobs import logprobs

    if logits.data_ptr() % ALIGNMENT:
        logits = logits.clone()
    found = logprobs(logits, chosen, min(max(top_n), logits.shape[1]))
    values = torch.cat((found.chosen[:, None], found.top), 1).clamp_(max=0.0)
    whole = torch.cat((found.rank[:, None].long(), found.top_ids), 1)
    # In one copy: every float32, rank, and id is a float64 as well.
    numbers = HostCopy(torch.stack((values.double(), whole.double()))).wait()
    return [
        TokenLogprobs(first, int(rank), tuple(zip(map(int, ids[:n]), others[:n], strict=True)))
        for (first, *others), (rank, *ids), n in zip(*numbers.tolist(), top_n, strict=True)
    ]
