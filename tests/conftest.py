"""Triton-lang kernels run in Triton's interpreter where there is no GPU.

The variable is read when Triton is imported, which importing the engine does: this file is loaded
before every other one of the tests.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
