"""Limits of differentiation: once, by autograd alone, and in reverse mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError


def check_first_derivative(what: str) -> None:
    """Raise RuntimeError in a backward that autograd records to differentiate it again: it leaves
    no history, so second derivatives would silently be zero.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{what} is differentiable once: expected a backward without create_graph, "
            "got one with it"
        )


def check_transforms(what: str, *tensors: Tensor) -> None:
    """Raise RuntimeError inside torch.func transforms, batches of gradients and forward mode."""
    if torch._C._are_functorch_transforms_active() or any(
        map(torch._C._functorch.is_legacy_batchedtensor, tensors)
    ):
        raise RuntimeError(
            f"{what} cannot be transformed by torch.func or vmap: expected calls of autograd alone"
        )
    is_forward_mode = forward_ad._current_level >= 0
    if is_forward_mode and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{what} has no forward mode: expected tensors without tangents")


def stops_recomputation(error: BaseException | None) -> bool:
    """Whether activation checkpointing ends a recomputation with this error, as it does once the
    last call of a checkpointed function has computed its results.
    """
    return isinstance(error, _StopRecomputationError)
