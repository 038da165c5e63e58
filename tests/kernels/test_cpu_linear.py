"""Packed linear layers against float64, on every instruction path this machine can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift_kernels.cpu import CpuOps
from chairlift_kernels.cpu.build import variants_here

SHAPES = [
    *((1, 576, 576), (2, 96, 48), (7, 37, 70), (13, 64, 32), (33, 100, 576), (300, 96, 40)),
    *((300, 96, 1536), (130, 40, 700)),
]


@pytest.fixture(scope="module", params=variants_here())
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return CpuOps(request.param)


def weights(n: int, k: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()


def inputs(m: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear_agrees_with_float64(ops: CpuOps, m: int, n: int, k: int) -> None:
    weight, x = weights(n, k), inputs(m, k)
    bias, residual = weights(1, n, 2)[0], inputs(m, n, 3)
    out = ops.linear(x, ops.pack_linear(weight, bias), residual=residual)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_fp32_output_keeps_the_accumulator(ops: CpuOps, m: int, n: int, k: int) -> None:
    weight, x = weights(n, k), inputs(m, k)
    out = ops.linear(x, ops.pack_linear(weight), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("k", [576, 1536])  # whole, and in pieces where there are rows enough
@pytest.mark.parametrize("rows", [0, 1, 11, 12, 13, 31, 32, 33, 65, 97, 257])
def test_a_row_does_not_depend_on_its_batch(ops: CpuOps, rows: int, k: int) -> None:
    packed, x = ops.pack_linear(weights(80, k)), inputs(300, k)
    alone = ops.linear(x, packed, out_dtype=torch.float32)
    assert torch.equal(ops.linear(x[:rows], packed, out_dtype=torch.float32), alone[:rows])
    assert torch.equal(ops.linear(x[5:6], packed, out_dtype=torch.float32), alone[5:6])


def test_rows_may_be_strided_and_neighbours_are_not_read(ops: CpuOps) -> None:
    wide = torch.full((9, 200), float("nan"), dtype=torch.bfloat16)
    wide[:, 40:110] = inputs(9, 70)
    packed = ops.pack_linear(weights(37, 70))
    assert torch.equal(ops.linear(wide[:, 40:110], packed), ops.linear(inputs(9, 70), packed))


def test_packed_weights_lie_one_after_the_other(ops: CpuOps) -> None:
    """A step reads them in this order, and pages of 2 MB hold several."""
    first, second = ops.pack_linear(weights(80, 576)), ops.pack_linear(weights(33, 70))
    assert second.panels_at - first.panels_at == first.panels.nbytes == 96 * 576 * 2
    large = ops.pack_linear(weights(1, 64).expand(600_000, 64))
    after = ops.pack_linear(weights(16, 32))
    assert large.panels.nbytes > 64 << 20, "more than a chunk of memory"
    assert all(p.panels_at % 64 == 0 for p in (first, second, large, after))
    x = inputs(2, 64)
    assert torch.equal(
        ops.linear(x, large)[:, -1], ops.linear(x, ops.pack_linear(weights(1, 64)))[:, 0]
    )


def test_a_transposed_weight_packs_like_its_copy(ops: CpuOps) -> None:
    weight = weights(48, 64)
    x = inputs(3, 48)
    first = ops.linear(x, ops.pack_linear(weight.T))
    assert torch.equal(first, ops.linear(x, ops.pack_linear(weight.T.contiguous())))


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1536, 576), (5, 40, 70), (34, 17, 32), (300, 48, 1536)]
)
def test_gate_up_agrees_with_float64(ops: CpuOps, activation: str, m: int, n: int, k: int) -> None:
    gate, up, x = weights(n, k) * 3, weights(n, k, 4), inputs(m, k)
    out = ops.gate_up(x, ops.pack_gate_up(gate, up), activation)
    rows = x.double()
    expected = ACTIVATIONS[activation](rows @ gate.double().T) * (rows @ up.double().T)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2e-3)


def test_wrong_shapes_and_types_are_refused(ops: CpuOps) -> None:
    packed = ops.pack_linear(weights(32, 64))
    with pytest.raises(ValueError, match=r"\[M, 64\]"):
        ops.linear(inputs(2, 32), packed)
    with pytest.raises(ValueError, match="residual"):
        ops.linear(inputs(2, 64), packed, residual=inputs(3, 32))
    with pytest.raises(TypeError, match="bf16"):
        ops.pack_linear(weights(32, 64).float())
    with pytest.raises(ValueError, match="activation"):
        ops.gate_up(inputs(2, 64), ops.pack_gate_up(weights(8, 64), weights(8, 64)), "relu")
