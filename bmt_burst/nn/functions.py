"""Rotary embedding by explicit positions, and SwiGLU.

Letters: B batch, S tokens of this rank, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fused import functions


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
    return functions.rotate(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise. (arXiv 2002.05202.)"""
    return functions.gate(gate, up)
