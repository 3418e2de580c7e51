"""Passes over tensors that torch would make in several kernels: one pass reads and writes once.

functions      rotary positions, SwiGLU and RMSNorm, with their gradients
norm           RMSNorm as a module
torch_passes   their specification, for CPUs and fp64
triton_passes  GPUs
meta_passes    tensors without values: they allocate what a GPU's pass does
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import meta_passes, torch_passes


def find_passes(x: Tensor) -> ModuleType:
    """Return the module of passes over tensors such as x."""
    if x.is_meta:
        return meta_passes
    if x.is_cuda and x.dtype != torch.float64:
        from . import triton_passes

        return triton_passes
    return torch_passes
