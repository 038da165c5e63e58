"""Settles rotary embeddings that change with the longest position of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

CHANGING = ("dynamic", "longrope")


def settle_rotary(model: nn.Module, max_model_len: int) -> list[str]:
    """Fix the frequencies of such embeddings at those for ``max_model_len``; returns their types.

    transformers chooses them anew in each forward, by the batch's longest position: in a batch of
    many requests one long prompt would turn the others' queries away from their cached keys, and
    the choice makes a GPU wait for the host.
    """
    settled = []
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
        changing = {layer: kind for layer, kind in by_layer.items() if _changes(kind)}
        if changing:
            _visit(module, max_model_len - 1, changing)
            # Under the decorators lies the function that only reads the frequencies.
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)
            settled += [str(kind) for kind in changing.values()]
    return settled


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and any(name in kind for name in CHANGING)


@torch.inference_mode(False)
@torch.no_grad()
def _visit(rotary: Any, position: int, layer_types: Iterable[str | None]) -> None:
    """Let transformers choose for the farthest position."""
    device = next(rotary.buffers()).device
    x = torch.zeros(1, 1, 1, device=device)
    for layer_type in layer_types:
        options = {} if layer_type is None else {"layer_type": layer_type}
        rotary(x, torch.tensor([[position]], device=device), **options)
