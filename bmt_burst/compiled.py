"""Elementwise functions in one pass over memory, by torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def fused_on_gpus(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of tensors; where the first of them is on a GPU compiled, and then differentiable once.

    Compiled when first called, once more for sizes of 1, and with and without gradient.
    """
    compiled = functools.cache(lambda: torch.compile(function, dynamic=True))

    @functools.wraps(function)
    def call(x: Tensor, *args: Tensor) -> Tensor:
        return (compiled() if x.is_cuda else function)(x, *args)

    return call
