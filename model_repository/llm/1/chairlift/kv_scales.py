"""Scales of an e4m3 KV cache, from a file: what a layer's keys and values are divided by.

    {"k": [0.05, [0.04, 0.06]], "v": [0.02, 0.02]}

An entry per layer: one number, or one for each KV head. The best scale of a head is its largest
absolute key or value / 448; anything beyond 448 times the scale is clamped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .attention import LayerShape

# Anything beyond is a mistake, and 1e-46 would be 0 in float32.
Scale = Annotated[float, Field(ge=1e-6, le=1e6)]
Heads = Annotated[list[Scale], BeforeValidator(lambda x: x if isinstance(x, list) else [x])]


class LayerScales(NamedTuple):
    """One number per KV head."""

    keys: list[float]
    values: list[float]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    k: list[Heads]
    v: list[Heads]


def read_scales(path: Path, layers: Sequence[LayerShape]) -> list[LayerScales]:
    """The scales of every layer; ``ValueError`` with the reason where they don't fit ``layers``."""
    try:
        file = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"setting 'kv_cache_scales': {path}: {error.strerror}") from None
    except ValidationError as error:
        reasons = [f"{_place(each['loc'])}{each['msg']}" for each in error.errors()]
        raise ValueError(f"setting 'kv_cache_scales': {path}: {'; '.join(reasons)}") from None
    for name, scales in (("k", file.k), ("v", file.v)):
        if len(scales) != len(layers):
            raise ValueError(
                f"setting 'kv_cache_scales': {path}: '{name}' has scales for {len(scales)} layers, "
                f"the model has {len(layers)}"
            )
        for index, (heads, layer) in enumerate(zip(scales, layers, strict=True)):
            if len(heads) not in (1, layer.num_kv_heads):
                raise ValueError(
                    f"setting 'kv_cache_scales': {path}: '{name}' has {len(heads)} scales for "
                    f"layer {index}, which has {layer.num_kv_heads} KV heads"
                )
    return [
        LayerScales(_per_head(k, layer), _per_head(v, layer))
        for k, v, layer in zip(file.k, file.v, layers, strict=True)
    ]


def _per_head(scales: list[float], layer: LayerShape) -> list[float]:
    return scales * layer.num_kv_heads if len(scales) == 1 else scales


def _place(loc: tuple[int | str, ...]) -> str:
    """'k' of layer 2: , with layers counted from 0."""
    if not loc:
        return ""
    layer = f" of layer {loc[1]}" if len(loc) > 1 else ""
    return f"'{loc[0]}'{layer}: "
