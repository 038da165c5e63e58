"""SwiGLU and GeGLU: the product of an activated gate and an up projection that lie side by side.

out = round(act(gate)) * up
silu(g) = g / (1 + e^-g)
gelu(g) = g (1 + erf(g / sqrt 2)) / 2
gelu_tanh(g) = g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2

gate_up   [T, 2 I], the gate first, last dimension contiguous; out [T, I]; bf16, fp16 or fp32
"""

from typing import Literal

import torch
import triton
import triton.language as tl

from chairlift_kernels.launch_table import ACTIVATION_BLOCK

Activation = Literal["silu", "gelu_tanh", "gelu"]


@triton.jit
def gated_activation_kernel(
    gate_up_ptr, out_ptr, stride_gate_up, stride_out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks of I)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    base = gate_up_ptr + row * stride_gate_up + columns
    gate = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + SIZE, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # tanh(y) = 1 - 2 / (e^2y + 1) does not overflow into inf / inf
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    out = active.to(dtype).to(tl.float32) * up
    tl.store(out_ptr + row * stride_out + columns, out.to(dtype), mask=inside)


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[..., 2 I] -> [..., I]; ValueError for an activation that is not one of the three."""
    if activation not in ("silu", "gelu_tanh", "gelu"):
        raise ValueError(f"activation {activation!r} is not silu, gelu_tanh or gelu")
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    size = rows.shape[1] // 2
    out = rows.new_empty(rows.shape[0], size)
    if rows.shape[0]:
        gated_activation_kernel[(rows.shape[0], triton.cdiv(size, ACTIVATION_BLOCK))](
            rows, out, rows.stride(0), out.stride(0),
            SIZE=size, BLOCK=ACTIVATION_BLOCK, ACTIVATION=activation, num_warps=4,
        )  # fmt: skip
    return out.view(*gate_up.shape[:-1], size)
