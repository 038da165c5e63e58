"""What the layer kernels compute, in plain torch, in the dtype of the inputs (float64 inputs make
an exact reference)."""

from typing import NamedTuple

import torch


class AttentionOptions(NamedTuple):
    """The options of one attention layer; sinks [H]."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * w, or * (1 + w), over the last dimension."""
    scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * (1 + weight if unit_offset else weight)


def gated_activation(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up for gate_up [..., 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    form = {"gelu": "none", "gelu_tanh": "tanh"}[activation]
    return torch.nn.functional.gelu(gate, approximate=form) * up


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, D] over its first R dimensions; cos, sin [T, R]."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    low, high = turned.chunk(2, dim=-1)
    partner = torch.cat((-high, low), dim=-1)
    return torch.cat((turned * cos[:, None] + partner * sin[:, None], rest), dim=-1)


def write_slots(cache: torch.Tensor, x: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """x [T, heads, D] into slots of cache [blocks, block_size, heads, D]; -1 writes nothing."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = x[kept].to(cache.dtype)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Causal attention of q [T, H, D] over [blocks, block_size, H_kv, D or Dv]; no keys give 0."""
    out = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    bounds = query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[row], bounds[row + 1]
        if end > begin and length > 0:
            blocks = block_tables[row, : -(-length // k_cache.shape[1])].long()
            k = k_cache[blocks].flatten(0, 1)[:length]
            v = v_cache[blocks].flatten(0, 1)[:length]
            out[begin:end] = _attend_row(q[begin:end], k, v, options)
    return out


def _attend_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """q [n, H, D] are the last n of len(k) positions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(q.dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    keys = torch.arange(k.shape[0], device=q.device)
    position = keys[-q.shape[0] :, None]
    visible = keys <= position
    if options.window is not None:
        visible &= keys > position - options.window
        v = torch.where((visible.any(0))[:, None, None], v, 0)  # left behind: may hold anything
    scores = scores.masked_fill(~visible, float("-inf"))
    if options.sinks is not None:
        sink = options.sinks.to(q.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)
