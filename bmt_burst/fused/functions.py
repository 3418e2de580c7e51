"""Rotary positions, gates and RMSNorm, each in one pass over memory and differentiable once.

torch.compile sees plain operations instead, which it fuses with their neighbours.

Letters: B batch, S tokens of this rank, H heads, D head size, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..base.autograd import check_first_derivative
from . import find_passes, torch_passes


def rope_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta^(-2 j / D), j < D / 2, for `positions` (S,) int64, or
    (B, S) if rows differ.

    Both are (S, D / 2), or (B, S, D / 2), fp32. Positions count from the start of the whole
    sequence. Documents that do not attend to each other may count from their own start
    (`Mask.positions`). (RoFormer, arXiv 2104.09864.)
    """
    return rotations(positions, rope_frequencies(head_dim, theta, positions.device))


def rope_frequencies(
    head_dim: int, theta: float, device: torch.device | str | None = None
) -> Tensor:
    """Return theta^(-2 j / D), j < D / 2: (D / 2,) fp64, radians from one position to the next."""
    return theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)


def rotations(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * frequency, times `scale`, in the shapes of `rope_tables`.

    `frequencies` are (D / 2,), or (B, D / 2) if rows differ, fp64. Phases are computed in fp64: at
    position 10^6 an fp32 phase is off by up to 0.06 rad.
    """
    phases = positions.double().unsqueeze(-1) * frequencies.unsqueeze(-2)
    return (phases.cos() * scale).float(), (phases.sin() * scale).float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_j, x_{j + D/2}) of x (B, S, H, D) by `rope_tables`, in fp32 or fp64.
    Return x's dtype.
    """
    fits = x.shape[-1] % 2 == 0 and not cos.requires_grad and not sin.requires_grad
    if torch.compiler.is_compiling() or x.is_cpu or not fits:
        return torch_passes.rotate(x, cos, sin)
    return _Rotate.apply(x, cos, sin)


def apply_gate(gate: Tensor, up: Tensor, silu: bool = True) -> Tensor:
    """Return silu(gate) * up, or sigmoid(gate) * up without `silu`."""
    fits = gate.dtype == up.dtype and gate.shape == up.shape
    if torch.compiler.is_compiling() or gate.is_cpu or not fits:
        return (functional.silu(gate) if silu else gate.sigmoid()) * up
    return _Gate.apply(gate, up, silu)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise. (arXiv 2002.05202.)"""
    return apply_gate(gate, up)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight for x (..., E), in x's dtype."""
    fits = weight is not None and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
    if torch.compiler.is_compiling() or x.is_cpu or not fits:
        return functional.rms_norm(x, x.shape[-1:], weight, eps)
    return _Norm.apply(x, weight, eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded to x's dtype.

    torch's CUDA kernel counts entries in 32 bits, up to torch 2.11 at least. It silently computes
    wrong values behind 2^32 of them, as 2^20 tokens of a model of width 4096 have
    (github.com/pytorch/pytorch/issues/181555). So GPUs run a kernel of this library.
    """

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps_of(x))

    def eps_of(self, x: Tensor) -> float:
        """Return the eps for a tensor such as x, by default that of its dtype."""
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return find_passes(x).rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        check_first_derivative("apply_rope")
        return find_passes(grads[0]).rotate(grads[0], *ctx.saved_tensors, back=True), None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.silu = silu
        return find_passes(gate).gate(gate, up, silu)

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
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        check_first_derivative("RMSNorm")
        x, weight, r = ctx.saved_tensors
        dx, dweight = find_passes(x).norm_gradients(grads[0], x, weight, r, None)
        return dx, dweight, None
