"""The C functions of the compiled library and the types of their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_LAYER = [_P, _L, _L, _L, _L]  # base, KV heads, key dim, value dim, block size

# One line per function, in the order of its C declaration (*.cpp of this folder).
_SIGNATURES: Mapping[str, list[Any]] = {
    # memory, bytes
    "chairlift_prefer_huge_pages": [_P, _L],
    "chairlift_prefer_quick_huge_pages": [_P, _L],
    # weight, n, k, row stride, packed, first slot, slot stride, threads
    "chairlift_pack": [_P, _L, _L, _L, _P, _L, _L, _I],
    # x, row stride, rows, k, packed, n, bias, residual, out, out is fp32, next weights, threads
    "chairlift_linear": [_P, _L, _L, _L, _P, _L, _P, _P, _P, _I, _P, _I],
    # x, row stride, rows, k, packed, inner, activation, out, row stride, next weights, threads
    "chairlift_gate_up": [_P, _L, _L, _L, _P, _L, _I, _P, _L, _P, _I],
    # layer, keys, token stride, values, token stride, slots, tokens, is fp32, threads
    "chairlift_write": [*_LAYER, _P, _L, _P, _L, _P, _L, _I, _I],
    # layer, block, keys, values, is fp32
    "chairlift_read": [*_LAYER, _L, _P, _P, _I],
    # layer bases, block bytes, layers, pairs, count, threads
    "chairlift_copy_blocks": [_P, _P, _L, _P, _L, _I],
    # q, token and head strides, out, token and head strides, layer, block tables, their width,
    # query starts, key counts, sequences, heads, scale, window, softcap, sinks, is fp32, threads
    "chairlift_attend": [
        *(_P, _L, _L, _P, _L, _L, *_LAYER, _P, _L),
        *(_P, _P, _L, _L, _F, _L, _F, _P, _I, _I),
    ],
    # x, residual, weight, out, row stride, rows, width, eps, unit offset, is fp32, threads
    "chairlift_rms_norm": [_P, _P, _P, _P, _L, _L, _L, _F, _I, _I, _I],
    # gate_up, out, rows, width, activation, is fp32, threads
    "chairlift_gated_activation": [_P, _P, _L, _L, _I, _I, _I],
    # qkv, token stride, cos, sin, angles, angles are fp32, layer, slots, q out, tokens, heads,
    # q norm, k norm, eps, unit offset, is fp32, threads
    "chairlift_rope_and_cache": [
        *(_P, _L, _P, _P, _L, _I, *_LAYER, _P, _P, _L, _L, _P, _P, _F, _I, _I, _I),
    ],
    # logits, row stride, rows, width, ids, values, is fp32, threads
    "chairlift_best_token": [_P, _L, _L, _L, _P, _P, _I, _I],
    # layers, their count, shape, batch (decoder.py), threads
    "chairlift_decoder": [_P, _L, _P, _P, _I],
}


def bind(library: ctypes.CDLL) -> None:
    """Declare every function's arguments, so that pointers and counts pass at full width."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.chairlift_instructions.restype = ctypes.c_char_p
