"""The greedy token against torch's argmax, on every instruction path here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps
from chairlift_kernels.cpu.build import variants_here

NAN, INF = float("nan"), float("inf")
# Less than a step of 16 lanes, ends within one and within a stretch of 1,024, several stretches.
WIDTHS = (1, 15, 16, 17, 1023, 1024, 1029, 5000)


@pytest.fixture(scope="module", params=variants_here())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


def check(ops: CpuOps, logits: Tensor) -> None:
    ids, values = ops.best_token(logits)
    torch.testing.assert_close(values, logits.float().amax(1), rtol=0, atol=0, equal_nan=True)
    first = (logits == logits.amax(1, keepdim=True)) | logits.isnan()
    assert ids.tolist() == first.int().argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_any_shape(ops: CpuOps, rows: int, width: int, dtype: torch.dtype) -> None:
    """In bf16 several of 5,000 random numbers are the largest: the first is wanted."""
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    check(ops, logits)
    check(ops, logits.abs().neg() - 1)


@pytest.mark.parametrize("place", [0, 3, 1040, 1999])
@pytest.mark.parametrize("value", [INF, NAN, 9.0])
def test_the_best_anywhere(ops: CpuOps, value: float, place: int) -> None:
    logits = torch.zeros(3, 2000)
    logits[1, place] = value
    logits[2, [place, -1]] = value
    check(ops, logits)


def test_banned_tokens_and_nothing_left(ops: CpuOps) -> None:
    logits = torch.full((3, 3000), -INF)
    logits[0, 2017] = -5.0
    logits[1, 2990:] = -7.0
    check(ops, logits)


def test_rows_of_a_wider_tensor(ops: CpuOps) -> None:
    wide = torch.randn(5, 640, generator=torch.Generator().manual_seed(1))
    check(ops, wide[:, :577])
    with pytest.raises(ValueError, match="stride"):
        ops.best_token(wide.t())
