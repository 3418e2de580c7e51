"""Passes over tensors without values: they allocate what a pass on a GPU does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    return torch.empty_like(x)


def gate(gate: Tensor, up: Tensor, silu: bool = True) -> Tensor:
    return torch.empty_like(gate)


def gate_gradients(
    gate: Tensor, up: Tensor, dout: Tensor, again: bool, silu: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    return torch.empty_like(gate), torch.empty_like(up), dout if again else None


def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=accumulator_dtype(x.dtype))


def norm_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, r: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)
