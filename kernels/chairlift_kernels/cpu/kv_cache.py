"""The paged KV cache of the CPU operators: who owns the memory, and where a block lies in it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_KEY_GROUP, _DEPTH = 16, 32  # matmul.h: keys of a panel, and what head dimensions are padded to


class LayerShape(NamedTuple):
    """KV heads of one layer, and the head dimension of its keys and of its values."""

    heads: int
    key_dim: int
    value_dim: int


class BlockContents(NamedTuple):
    """Keys [block_size, heads, key_dim] and values [block_size, heads, value_dim] of a block."""

    keys: Tensor
    values: Tensor


def bytes_per_block(
    shapes: Sequence[LayerShape], block_size: int = 16, dtype: torch.dtype = torch.bfloat16
) -> int:
    """Bytes one block takes over all layers, padding included."""
    return sum(_block_elements(LayerShape(*shape), block_size) for shape in shapes) * dtype.itemsize


class KvCache:
    """Keys and values by layer and block, laid out for the matrix kernel (cache.h says how).

    Nothing is initialised at allocation: attention reads only what was written.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        shapes: Sequence[LayerShape],
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if block_size <= 0 or block_size % _KEY_GROUP:
            raise ValueError(f"block_size must be a multiple of {_KEY_GROUP}, not {block_size}")
        if dtype not in (torch.bfloat16, torch.float32):
            raise TypeError(f"a cache holds bf16 or fp32, not {dtype}")
        self.shapes = [LayerShape(*shape) for shape in shapes]
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.is_float = int(dtype == torch.float32)
        self._library = library
        elements = [_block_elements(shape, block_size) for shape in self.shapes]
        memory = torch.empty(num_blocks * sum(elements), dtype=dtype)
        library.chairlift_prefer_quick_huge_pages(memory.data_ptr(), memory.nbytes)
        ends = accumulate(num_blocks * count for count in elements)
        self.layers = [
            memory[end - num_blocks * count : end].view(num_blocks, count)
            for count, end in zip(elements, ends, strict=True)
        ]
        self._bases = torch.tensor([layer.data_ptr() for layer in self.layers])
        self._block_bytes = torch.tensor([count * dtype.itemsize for count in elements])
        # base pointer, heads, key_dim, value_dim, block_size: how every C function takes a layer
        self.arguments = [
            (layer.data_ptr(), *shape, block_size)
            for layer, shape in zip(self.layers, self.shapes, strict=True)
        ]

    def write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Store keys [T, heads, key_dim] and values at slots int64 [T]; slot -1 skips a token."""
        heads, key_dim, value_dim = self.shapes[layer]
        tokens = slot_mapping.shape[0]
        keys = self._checked(keys, (tokens, heads, key_dim), "keys")
        values = self._checked(values, (tokens, heads, value_dim), "values")
        slots = checked_index(slot_mapping, torch.int64, "slot_mapping")
        self._library.chairlift_write(
            *self.arguments[layer],
            *(keys.data_ptr(), keys.stride(0), values.data_ptr(), values.stride(0)),
            *(slots.data_ptr(), tokens, self.is_float, torch.get_num_threads()),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks, in order, in every layer."""
        if not pairs:
            return
        if not all(0 <= block < self.num_blocks for pair in pairs for block in pair):
            raise IndexError(f"block outside 0..{self.num_blocks - 1} in {pairs}")
        table = torch.tensor(pairs)
        self._library.chairlift_copy_blocks(
            *(self._bases.data_ptr(), self._block_bytes.data_ptr(), len(self.layers)),
            *(table.data_ptr(), len(pairs), torch.get_num_threads()),
        )

    def read_block(self, layer: int, block: int) -> BlockContents:
        """What the cache holds in one block, in plain order."""
        heads, key_dim, value_dim = self.shapes[layer]
        keys = torch.empty((self.block_size, heads, key_dim), dtype=self.dtype)
        values = torch.empty((self.block_size, heads, value_dim), dtype=self.dtype)
        self._library.chairlift_read(
            *self.arguments[layer],
            *(block, keys.data_ptr(), values.data_ptr(), self.is_float),
        )
        return BlockContents(keys, values)

    def _checked(self, rows: Tensor, shape: tuple[int, int, int], name: str) -> Tensor:
        if rows.dtype != self.dtype or rows.shape != shape:
            raise ValueError(
                f"{name} must be {self.dtype} {shape}, not {rows.dtype} {tuple(rows.shape)}"
            )
        inner_contiguous = rows.stride(2) == 1 and rows.stride(1) == shape[2]
        return rows if inner_contiguous else rows.contiguous()


def checked_index(index: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor itself if C can read it as an array of `dtype`."""
    if index.dtype != dtype or not index.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype}, not {index.dtype}")
    return index


def _block_elements(shape: LayerShape, block_size: int) -> int:
    key_depth = -(-shape.key_dim // _DEPTH) * _DEPTH
    value_columns = -(-shape.value_dim // _KEY_GROUP) * _KEY_GROUP
    return shape.heads * block_size * (key_depth + value_columns)
