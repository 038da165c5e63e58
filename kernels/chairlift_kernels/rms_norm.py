"""RMSNorm, with the residual addition before it where there is one.

h = x + residual                        rounded to the dtype of x, and kept in `residual`
n = h / sqrt(mean(h^2) + eps)           in fp32
out = round(n) * w                      Llama form: n is rounded to the dtype of x before the weight
out = n * (1 + w)                       Gemma form (unit_offset): fp32 until the end

x, residual, out   [T, N], last dimension contiguous; weight [N]; bf16, fp16 or fp32
"""

import torch
import triton
import triton.language as tl

from chairlift_kernels.launch_table import row_warps


@triton.jit
def normalise(x, weight, mean_square, eps, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """fp32 x and weight -> fp32 values that are exact in `dtype`."""
    scaled = x * tl.rsqrt(mean_square + eps)
    if not UNIT_OFFSET:
        scaled = scaled.to(dtype).to(tl.float32)
    factor = 1.0 + weight if UNIT_OFFSET else weight
    return (scaled * factor).to(dtype).to(tl.float32)


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    stride_x, stride_residual, stride_out,
    N: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Grid (T,): a program per row, the row in registers."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = residual_ptr + row * stride_residual + columns
        total = x + tl.load(residual, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual, total.to(residual_ptr.dtype.element_ty), mask=inside)
        x = total.to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    out = normalise(x, weight, tl.sum(x * x, axis=0) / N, eps, dtype, UNIT_OFFSET)
    tl.store(out_ptr + row * stride_out + columns, out.to(dtype), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> torch.Tensor:
    """The norm of x, or of residual += x (in place), over the last dimension; a new tensor."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    kept = None if residual is None else residual.view(-1, size)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.shape[0] == 0:
        return out.view(x.shape)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(rows.shape[0],)](
        rows, kept, weight, out, eps,
        rows.stride(0), 0 if kept is None else kept.stride(0), out.stride(0),
        N=size, BLOCK=block, RESIDUAL=kept is not None, UNIT_OFFSET=unit_offset,
        num_warps=row_warps(block),
    )  # fmt: skip
    return out.view(x.shape)
