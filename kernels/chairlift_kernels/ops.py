"""The operators of a decoder layer on a GPU, under the names that the CPU's operators have too."""

from collections.abc import Sequence

import torch
import triton

from chairlift_kernels import gated_activation as gated
from chairlift_kernels import rms_norm as norms
from chairlift_kernels.attention import Options, Rows, attend_rows, lengths_of_forms
from chairlift_kernels.kv_cache import FP8, KvCache, LayerShape, Scales
from chairlift_kernels.launch_table import (
    HEADS_PER_PROGRAM,
    Capability,
    capability_of,
    padded,
    supports_fp8,
)
from chairlift_kernels.rope_cache import rope_cache_kernel


class TritonOps:
    """Launches the kernels on one device; all it knows is the device and what that can do.

    `capability` stands in for the device's own where there is none to ask, as in compile checks.
    """

    def __init__(
        self, device: torch.device | str = "cuda", capability: Capability | None = None
    ) -> None:
        self.device = torch.device(device)
        self.capability = capability or capability_of(self.device)

    def allocate_cache(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        scales: Sequence[Scales] | None = None,
    ) -> KvCache:
        """A cache of one (heads, key_dim, value_dim) per layer; kv_cache.bytes_per_block sizes it.

        ValueError for e4m3 on a device older than sm_89, and for head dimensions above 256.
        """
        if dtype == FP8 and not supports_fp8(self.capability):
            major, minor = self.capability
            raise ValueError(
                f"an e4m3 cache needs sm_89 or newer, this device is sm_{major}{minor}"
            )
        for _, key_dim, value_dim in shapes:
            if max(key_dim, value_dim) > 256:
                raise ValueError(f"head dimensions {key_dim} and {value_dim}: 256 is the limit")
        return KvCache(shapes, num_blocks, block_size, dtype, self.device, scales)

    def decode_lengths(self, max_seq_len: int) -> list[int]:
        """Context lengths up to the limit, one for each compiled form of decode attention."""
        return lengths_of_forms(max_seq_len)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        residual: torch.Tensor | None = None,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """RMSNorm of x [..., N]; with a residual, residual += x in place, and the sum is normed."""
        return norms.rms_norm(x, weight, eps, residual=residual, unit_offset=unit_offset)

    def gated_activation(self, gate_up: torch.Tensor, activation: gated.Activation) -> torch.Tensor:
        """act(gate) * up for gate_up [..., 2 I], the gate first."""
        return gated.gated_activation(gate_up, activation)

    def rope_and_cache(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        cache: KvCache,
        layer: int,
        slot_mapping: torch.Tensor,
        *,
        num_heads: int,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
        unit_offset: bool = False,
    ) -> torch.Tensor:
        """Norm and rotate q and k, write k and v to the cache; returns q [T, H, D].

        qkv [T, (H + H_kv) D + H_kv Dv], cos and sin [T, R], slot_mapping int64 [T] with -1 for
        tokens that are not kept. ValueError where only one of the two norms is given.
        """
        if (q_norm is None) != (k_norm is None):
            raise ValueError("q_norm and k_norm come together")
        keys, values, scales = cache.layers[layer]
        kv_heads, size, v_size = cache.shapes[layer]
        turned = cos.shape[-1]
        q = torch.empty(qkv.shape[0], num_heads, size, dtype=qkv.dtype, device=qkv.device)
        if qkv.shape[0] == 0:
            return q
        groups = sum(triton.cdiv(heads, HEADS_PER_PROGRAM) for heads in (num_heads, kv_heads))
        rope_cache_kernel[(qkv.shape[0], groups)](
            qkv, cos, sin, q, keys, values, *(scales or (None, None)), slot_mapping,
            q_norm, k_norm, eps, qkv.stride(0), cos.stride(0), sin.stride(0), q.stride(0),
            *keys.stride()[:3], *values.stride()[:3],
            HEADS=num_heads, KV_HEADS=kv_heads, D=size, DV=v_size, R=turned,
            HALF_PAD=padded(turned // 2), TAIL_PAD=padded(size - turned) if turned < size else 1,
            DV_PAD=padded(v_size), BLOCK_SIZE=cache.block_size, BLOCK_H=HEADS_PER_PROGRAM,
            NORM=q_norm is not None, UNIT_OFFSET=unit_offset, SCALED=scales is not None,
            num_warps=2,
        )  # fmt: skip
        return q

    def attend(
        self,
        q: torch.Tensor,
        cache: KvCache,
        layer: int,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        num_decodes: int,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of q [T, H, D] over the cache; returns [T, H, Dv], `out` where given.

        block_tables int32 [R, max_blocks], query_start int32 [R + 1], seq_lens int32 [R] (new
        tokens counted). The first num_decodes rows have one query token each, the others up to
        max_query_len, and no row has more than max_seq_len keys: grids follow from these host
        integers, never from what is on the device. Rows of no keys or no queries are padding.
        `window` counts the query's own token; sinks fp32 [H].
        """
        if window is not None and window < 1:
            raise ValueError(f"window {window} is below 1")
        if num_decodes < seq_lens.shape[0] and max_query_len < 1:
            raise ValueError("rows beyond num_decodes need max_query_len >= 1")
        part = cache.layers[layer]
        if out is None:
            out = torch.empty(*q.shape[:2], part.values.shape[3], dtype=q.dtype, device=q.device)
        rows = Rows(block_tables, query_start, seq_lens, num_decodes, max_seq_len)
        attend_rows(q, part, rows, Options(scale, window, softcap, sinks), out, self.capability)
        return out
