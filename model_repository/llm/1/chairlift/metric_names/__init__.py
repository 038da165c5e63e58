"""Every metric this server exports, by whose name it has."""

from __future__ import annotations

from . import own, trtllm, vllm
from .spec import Kind, Spec

ALL: tuple[Spec, ...] = (*vllm.SPECS, *trtllm.SPECS, *own.SPECS)

__all__ = ["ALL", "Kind", "Spec", "own", "trtllm", "vllm"]
