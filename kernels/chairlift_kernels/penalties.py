"""Repetition, presence and frequency penalties from tables of token counts, in place.

l = l / r where l > 0 else l * r        tokens in the prompt or the output (repetition penalty r)
l = l - frequency * n - presence        tokens n > 0 times in the output

logits                         fp32 [R, V], last dimension contiguous
prompt_counts, output_counts   integer [slots, V]; row i's table is slots[i], int64 [R]
repetition, presence, frequency    fp32 [R]; off: 1, 0, 0
"""

import torch
import triton
import triton.language as tl

from chairlift_kernels.launch_table import VOCAB_BLOCK


@triton.jit(
    do_not_specialize_on_alignment=["slots", "repetition", "presence", "frequency"],
)
def penalties_kernel(
    logits, prompt_counts, output_counts, slots, repetition, presence, frequency,
    stride_row, stride_prompt, stride_output, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (R, blocks of V)."""
    index = tl.program_id(0)
    r = tl.load(repetition + index)
    present = tl.load(presence + index)
    frequent = tl.load(frequency + index)
    if (r == 1.0) & (present == 0.0) & (frequent == 0.0):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    slot = tl.load(slots + index).to(tl.int64)
    row = logits + index.to(tl.int64) * stride_row + columns
    x = tl.load(row, mask=inside, other=0.0)
    asked = tl.load(prompt_counts + slot * stride_prompt + columns, mask=inside, other=0)
    given = tl.load(output_counts + slot * stride_output + columns, mask=inside, other=0)
    seen = (asked > 0) | (given > 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, r), x * r), x)
    x -= tl.where(given > 0, frequent * given.to(tl.float32) + present, 0.0)
    tl.store(row, x, mask=inside)


def apply_penalties(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    slots: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """Changes logits in place; rows with all three off are left alone and not read."""
    rows, size = logits.shape
    penalties_kernel[(rows, triton.cdiv(size, VOCAB_BLOCK))](
        logits, prompt_counts, output_counts, slots, repetition, presence, frequency,
        logits.stride(0), prompt_counts.stride(0), output_counts.stride(0), size,
        BLOCK=VOCAB_BLOCK, num_warps=8,
    )  # fmt: skip
