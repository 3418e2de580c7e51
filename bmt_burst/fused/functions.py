"""Rotary positions, gates and RMSNorm, each in one pass over memory and differentiable once.

torch.compile sees plain operations instead, which it fuses with their neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..base.autograd import check_first_derivative
from . import find_passes, torch_passes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of x, see `torch_passes.rotate`."""
    fits = x.shape[-1] % 2 == 0 and not cos.requires_grad and not sin.requires_grad
    if torch.compiler.is_compiling() or x.is_cpu or not fits:
        return torch_passes.rotate(x, cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def gate(gate: Tensor, up: Tensor, silu: bool = True) -> Tensor:
    """Return silu(gate) * up, or sigmoid(gate) * up without `silu`."""
    fits = gate.dtype == up.dtype and gate.shape == up.shape
    if torch.compiler.is_compiling() or gate.is_cpu or not fits:
        return (functional.silu(gate) if silu else gate.sigmoid()) * up
    gated: Tensor = _Gate.apply(gate, up, silu)
    return gated


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for x (..., E), in x's dtype."""
    fits = weight is not None and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
    if torch.compiler.is_compiling() or x.is_cpu or not fits:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    normed: Tensor = _Norm.apply(x, weight, eps)
    return normed


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        rotated: Tensor = find_passes(x).rotate(x, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        check_first_derivative("apply_rope")
        return find_passes(grads[0]).rotate_back(grads[0], *ctx.saved_tensors), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.silu = silu
        gated: Tensor = find_passes(gate).gate(gate, up, silu)
        return gated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        check_first_derivative("a gate")
        gate, up = ctx.saved_tensors
        passes = find_passes(gate)
        dgate, dup, _ = passes.gate_gradients(gate, up, grads[0], again=False, silu=ctx.silu)
        return dgate, dup, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, r = find_passes(x).normalize(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        out: Tensor = normed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        check_first_derivative("RMSNorm")
        x, weight, r = ctx.saved_tensors
        dx, dweight = find_passes(x).norm_gradients(grads[0], x, weight, r, None)
        return dx, dweight, None
