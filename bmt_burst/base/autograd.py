"""Limits of differentiation: functions here are differentiable once, in reverse mode, by autograd
alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual


def check_first_derivative(what: str) -> None:
    """Raise RuntimeError in a backward that autograd records, to differentiate it again.

    What a backward computes here has no history, so second derivatives would silently be zero.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} is differentiable once: expected a backward without create_graph, got one with it"
        )


def check_transforms(what: str, *tensors: Tensor) -> None:
    """Raise RuntimeError inside a torch.func transform, and for tensors of a batch of gradients or
    of forward mode.
    """
    if torch._C._are_functorch_transforms_active() or any(
        map(torch._C._functorch.is_legacy_batchedtensor, tensors)
    ):
        raise RuntimeError(
            f"{what} cannot be transformed by torch.func or vmap: expected calls of autograd alone"
        )
    if any(unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{what} has no forward mode: expected tensors without tangents")
