"""What the operators would launch, recorded without a GPU.

While recording, a launch of a Triton-lang kernel is noted instead of run, with its arguments turned
into a signature by the rules of Triton's own launcher: so the compile checks see the very
specialisations that the operators ask for. Not for use under TRITON_INTERPRET.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_OPTIONS = ("num_warps", "num_stages")


class Launch(NamedTuple):
    """One specialisation: types and constants by name, names divisible by 16, options."""

    kernel: Any
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def source(self) -> ASTSource:
        """What triton.compile takes."""
        names = [name for name, _ in self.types]
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.aligned}
        return ASTSource(self.kernel, dict(self.types), dict(self.constants), attributes)

    def compile(self, target: GPUTarget) -> Any:
        """The compiled kernel, with .asm and .metadata; whatever the compiler raises."""
        return triton.compile(self.source(), target=target, options=dict(self.options))


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches made inside, in order; their outputs hold nothing."""
    launches: list[Launch] = []
    run: Callable[..., Any] = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(kernel, args, kwargs))

    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


def _launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    values = dict(zip([p.name for p in kernel.params], args, strict=False)) | kwargs
    types, constants, aligned = [], [], []
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if isinstance(value, int) and not isinstance(value, bool) and not parameter.is_constexpr:
            fixed = value == 1 and not parameter.do_not_specialize
        if fixed:
            types.append((name, "constexpr"))
            constants.append((name, value))
            continue
        types.append((name, _type_of(value)))
        pointer = isinstance(value, torch.Tensor)
        multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if (pointer and not parameter.do_not_specialize_on_alignment) or multiple:
            aligned.append(name)
    options = tuple((name, kwargs[name]) for name in _OPTIONS if name in kwargs)
    return Launch(kernel, tuple(types), tuple(constants), tuple(aligned), options)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
