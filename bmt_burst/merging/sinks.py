"""Attention sinks: a trained logit for each head, as of one more key that every query sees.

Its score is s and its value 0. Let o and l be out and lse over the other keys. With the sink they
are

    l' = logaddexp(l, s)    o' = exp(l - l') o = sigmoid(l - s) o

Sinks are therefore applied once, after the strategy's forward, which does not know them.

A strategy's backward is exact if it gets o' and l' instead of o and l. For each pair it computes
P = exp(score - l'), the pair's probability next to the sink, and dS = P (dP - delta), where
delta = rowsum(o' * dout) = sum_j P_j dP_j over all keys. The sink's term in it is 0, because its
dP is 0. Only the sink's own dS = exp(s - l') (0 - delta) is missing. Its sum over queries is the
gradient of s.

Queries that see nothing have l = -inf, so o' is 0 and l' is s. If s is inf, the sink takes all
attention: o' and all gradients are 0, and l' is inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus
from .merge import stack_lse_delta
from .parts import by_token


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return o' (B, S, H, D) in out's dtype and l' (B, H, S), new memory, for sinks (H,) of lse's
    dtype.
    """
    return _outputs(out, lse, sinks), torch.logaddexp(lse, sinks.unsqueeze(-1))


def decoded_with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return o' of a few queries that all see a key. Compiling it would take longer than a short
    generation.
    """
    return out * by_token(lse - sinks.unsqueeze(-1)).sigmoid()


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient (H,) of the sinks from o', l' and the gradient of o'."""
    delta = stack_lse_delta(out, dout, lse)[..., 1].transpose(1, 2)
    # where lse is -inf the sink is too; where it is inf, delta is 0
    probs = (sinks.unsqueeze(-1) - lse).exp().masked_fill(lse.isinf(), 0.0)
    return -(probs * delta).sum((0, 2))


@fused_on_gpus
def _outputs(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    share, nothing = by_token(lse - sinks.unsqueeze(-1)).sigmoid(), by_token(lse == -torch.inf)
    return (out * share).masked_fill(nothing, 0.0).to(out.dtype)
