"""Limits of differentiation: functions here are differentiable once, in reverse mode, by autograd alone."""

from __future__ import annotations

import torch


def check_first_derivative(what: str) -> None:
    """Raise RuntimeError in a backward that autograd records, to differentiate it again.

    What a backward computes here has no history, so second derivatives would silently be zero.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} is differentiable once: expected a backward without create_graph, got one with it")
