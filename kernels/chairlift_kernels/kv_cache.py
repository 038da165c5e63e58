"""The paged KV cache of all layers on one device.

Layers of one shape share one allocation [L, blocks, block_size, H_kv, D], so that copying blocks is
one launch for all of them. Contents are uninitialised, as the kernels allow. In e4m3 every layer
has scales, fp32 [H_kv], for keys and for values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton

from chairlift_kernels.block_copy import block_copy_kernel
from chairlift_kernels.kv_write import kv_write_kernel
from chairlift_kernels.launch_table import COPY_BLOCK, HEADS_PER_PROGRAM, padded

FP8 = torch.float8_e4m3fn


class LayerShape(NamedTuple):
    """KV heads of one layer, and the head dimension of its keys and of its values."""

    heads: int
    key_dim: int
    value_dim: int


class BlockContents(NamedTuple):
    """One block of one layer: keys [block_size, heads, key_dim] and values alike."""

    keys: torch.Tensor
    values: torch.Tensor


class Scales(NamedTuple):
    """What e4m3 keys and values were divided by, fp32 [heads]."""

    keys: torch.Tensor
    values: torch.Tensor


class Layer(NamedTuple):
    """One layer's cache [blocks, block_size, heads, dim]; scales where it is e4m3."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None


def bytes_per_block(
    shapes: Sequence[LayerShape], block_size: int = 16, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes one block takes over all layers."""
    elements = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in shapes)
    return block_size * elements * dtype.itemsize


class KvCache:
    """Blocks by id, and slots: slot = block * block_size + place in the block."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: Sequence[Scales] | None = None,
    ) -> None:
        """Allocate; an e4m3 cache takes one pair of scales per layer, and 1 without them.

        ValueError from 2^31 slots on: the kernels hold a slot, not its offset, in 32 bits.
        """
        if num_blocks * block_size >= 2**31:
            raise ValueError(f"{num_blocks} blocks of {block_size} are 2^31 slots or more")
        self.shapes = [LayerShape(*shape) for shape in shapes]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        # Zeros: the steps that warm up read blocks nobody has written. What memory held before can
        # be NaN, and such rows are given up before all of their kernels have been asked for.
        self._stacks = {
            shape: [
                torch.zeros(
                    (self.shapes.count(shape), num_blocks, block_size, shape.heads, dim),
                    dtype=dtype,
                    device=device,
                )
                for dim in (shape.key_dim, shape.value_dim)
            ]
            for shape in dict.fromkeys(self.shapes)
        }
        free = {shape: zip(*stacks, strict=True) for shape, stacks in self._stacks.items()}
        self.layers = []
        for index, shape in enumerate(self.shapes):
            keys, values = next(free[shape])
            own = None
            if dtype == FP8:
                ones = torch.ones(shape.heads, device=device)
                own = Scales(ones, ones) if scales is None else Scales(*scales[index])
            self.layers.append(Layer(keys, values, own))

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store keys [T, heads, key_dim] and values at slots int64 [T]; slot -1 skips a token."""
        part = self.layers[layer]
        if keys.shape[0] == 0:
            return
        for x, target, scale in zip(
            (keys, values), part[:2], part.scales or (None, None), strict=True
        ):
            heads, size = x.shape[1:]
            kv_write_kernel[(x.shape[0], triton.cdiv(heads, HEADS_PER_PROGRAM))](
                x, target, scale, slot_mapping, x.stride(0), x.stride(1), *target.stride()[:3],
                KV_HEADS=heads, D=size, D_PAD=padded(size), BLOCK_SIZE=self.block_size,
                BLOCK_H=HEADS_PER_PROGRAM, SCALED=scale is not None, num_warps=2,
            )  # fmt: skip

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks, in order, in every layer."""
        if not all(0 <= block < self.num_blocks for pair in pairs for block in pair):
            raise IndexError(f"block outside 0..{self.num_blocks - 1} in {pairs}")
        device = self.layers[0].keys.device
        for wave in independent_waves(pairs):
            # From other memory than page-locked the host would wait for the device.
            host = torch.tensor(wave, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._copy(host.to(device, non_blocking=True))

    def _copy(self, pairs: torch.Tensor) -> None:
        for stack in (stack for stacks in self._stacks.values() for stack in stacks):
            data = stack.view(torch.uint8) if stack.dtype == FP8 else stack
            size = stack[0, 0].numel()
            grid = (pairs.shape[0], stack.shape[0], triton.cdiv(size, COPY_BLOCK))
            block_copy_kernel[grid](
                data, pairs, data.stride(0), data.stride(1),
                SIZE=size, BLOCK=COPY_BLOCK, num_warps=4,
            )  # fmt: skip

    def read_block(self, layer: int, block: int) -> BlockContents:
        """What the cache holds in one block: copies; an e4m3 block comes back scaled, in fp32."""
        keys, values, scales = self.layers[layer]
        if scales is None:
            return BlockContents(keys[block].clone(), values[block].clone())
        return BlockContents(
            keys[block].float() * scales.keys[:, None],
            values[block].float() * scales.values[:, None],
        )


def independent_waves(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Consecutive pairs cut into groups that may be copied in any order among themselves."""
    waves: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if not waves or source in written or target in written or target in read:
            waves.append([])
            read, written = set(), set()
        waves[-1].append((source, target))
        read.add(source)
        written.add(target)
    return waves
