"""Passes over tensors that torch would make in several kernels: one pass reads and writes once.

functions      rotary positions, SwiGLU and RMSNorm, with their gradients
torch_passes   their specification, for CPUs and fp64
triton_passes  GPUs
meta_passes    tensors without values: they allocate what a GPU's pass does
"""

from __future__ import annotations

from ..base.registry import Modules

find_passes = Modules(
    __name__, {"triton": "triton_passes", "meta": "meta_passes", "torch": "torch_passes"}
).find
