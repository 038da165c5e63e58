"""Triton-lang kernels run on the GPU where there is one, and else in Triton's interpreter.

The variable is read when Triton is imported, which no test module does before this file.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton-lang kernels of this run work."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """triton_dtype: fp32 and fp16, and bf16 on a GPU, as the interpreter rounds it otherwise."""
    if "triton_dtype" in metafunc.fixturenames:
        types = [torch.float32, torch.float16]
        if torch.cuda.is_available():
            types.append(torch.bfloat16)
        metafunc.parametrize("triton_dtype", types, ids=lambda dtype: str(dtype)[6:])
