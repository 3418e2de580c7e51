"""A result that is computed after its inputs are saved.

Activation checkpointing ends a recomputation as soon as all tensors are saved again. A function
saves them after it has computed its result, so the result of the last one would be computed for
nothing. Instead, a function saves its inputs and returns a stand-in, and `Later` computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def make_stand_in(x: Tensor) -> Tensor:
    """Return a tensor with the shape and dtype of x, and memory for one number."""
    return x.new_empty(()).expand_as(x)


class Later(torch.autograd.Function):
    """Computes the result for which `stand_in` stands. The gradient goes to the stand-in."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
