"""The C functions of the compiled library and the types of their arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

# One line per function, in the order of its C declaration (*.cpp of this folder).
_SIGNATURES: Mapping[str, list[Any]] = {
    # weight, n, k, row stride, packed, first slot, slot stride, threads
    "chairlift_pack": [_P, _L, _L, _L, _P, _L, _L, _I],
    # x, row stride, rows, k, packed, n, bias, residual, out, out is fp32, threads
    "chairlift_linear": [_P, _L, _L, _L, _P, _L, _P, _P, _P, _I, _I],
    # x, row stride, rows, k, packed, inner, activation, out, threads
    "chairlift_gate_up": [_P, _L, _L, _L, _P, _L, _I, _P, _I],
}


def bind(library: ctypes.CDLL) -> None:
    """Declare every function's arguments, so that pointers and counts pass at full width."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.chairlift_instructions.restype = ctypes.c_char_p
