"""What the sampling kernels compute, in plain torch with sorts."""

import torch

from chairlift_kernels.noise import gumbel_noise


def keep_mask(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Tokens that min-p, top-k and then top-p of what is left keep: bool [R, V]; ties stay."""
    size = logits.shape[1]
    z = logits / temperature.clamp(min=1e-30)[:, None]
    ordered = z.sort(dim=1, descending=True).values
    k = torch.where((top_k > 0) & (top_k < size), top_k, size).long()
    keep = z >= ordered.gather(1, k[:, None] - 1)
    keep &= z >= ordered[:, :1] + min_p.log()[:, None]
    p = torch.where(keep, z, float("-inf")).softmax(1)
    falling = p.sort(dim=1, descending=True).values
    reached = falling.cumsum(1) >= top_p[:, None]
    reached[:, -1] = True
    last = reached.to(torch.int8).argmax(1, keepdim=True)
    nucleus = (p >= falling.gather(1, last)) | (top_p >= 1)[:, None]
    filtered = keep & nucleus
    return torch.where((temperature > 0)[:, None], filtered, True)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    sample_index: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Token ids int64 [R]: argmax of logits / temperature + noise over the kept tokens."""
    keep = keep_mask(logits, temperature, top_k, top_p, min_p)
    noise = gumbel_noise(seeds, sample_index, positions, logits.shape[1])
    score = logits / torch.where(temperature > 0, temperature, 1)[:, None]
    score = torch.where((temperature > 0)[:, None], score + noise, score)
    return score.masked_fill(~keep, float("-inf")).argmax(1)


def apply_penalties(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalised logits [R, V] from the rows' own counts [R, V]."""
    seen = (prompt_counts > 0) | (output_counts > 0)
    r = repetition[:, None]
    out = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
    return out - frequency[:, None] * output_counts - presence[:, None] * (output_counts > 0)
