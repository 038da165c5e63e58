"""Which compiled forms of the Triton-lang kernels would be asked for, seen from the interpreter.

A launch is described as Triton's launcher does: constants by value, integers by whether they are 1
or a multiple of 16, pointers by type and alignment, unless the kernel says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

Form = tuple[Any, ...]
ALIGNMENT = 16


@contextmanager
def recorded() -> Iterator[set[Form]]:
    """The forms launched inside; they run as ever."""
    forms: set[Form] = set()
    run = InterpretedFunction.run

    def noting(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        forms.add(form_of(kernel, args, kwargs))
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = noting
    try:
        yield forms
    finally:
        InterpretedFunction.run = run


def form_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    params = JITFunction(kernel.fn, **kernel.kwargs).params
    values = dict(zip([p.name for p in params], args, strict=False)) | kwargs
    parts = [(p.name, _part(p, values[p.name])) for p in params]
    options = [(name, kwargs[name]) for name in ("num_warps", "num_stages") if name in kwargs]
    return (kernel.fn.__name__, *parts, *options)


def _part(param: Any, value: Any) -> Any:
    if param.is_constexpr or value is None:
        return value
    if isinstance(value, torch.Tensor):
        aligned = value.data_ptr() % ALIGNMENT == 0
        return value.dtype, param.do_not_specialize_on_alignment or aligned
    if isinstance(value, int) and not param.do_not_specialize:
        return 1 if value == 1 else (value % ALIGNMENT == 0, -(2**31) <= value < 2**31)
    return type(value)
