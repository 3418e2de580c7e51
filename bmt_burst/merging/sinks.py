"""Attention sinks: for each head a learned logit, which takes part in the softmax's divisor and has
no value.

A sink is one more key that every query sees, with the score s and a value of 0. With out and lse
those of the keys that there are, o and l, those with the sink are

    l' = logaddexp(l, s)    o' = exp(l - l') o = sigmoid(l - s) o

so it is put in once, above strategies, whose forward knows nothing of it.

Their backward is exact with o' and l' in the place of o and l. Of each pair it makes P = exp(score
- l'), which is its probability beside the sink, and dS = P (dP - delta) with delta = rowsum(o' *
  dout) = sum_j P_j dP_j. That sum is over
all keys, and the sink's term is 0, since its value is, and so its dP. So dS, and dq, dk and dv that
follow from it, are those of attention to the keys and the sink. What no call has is the sink's own
dS = exp(s - l') (0 - delta), whose sum over queries is the gradient of s.

Queries that see nothing have an l of -inf: their o' is 0 and their l' is s. With an s of inf all
attention goes to the
sink: o' and all gradients are 0, and l' is inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus
from .merge import stack_lse_delta


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """o' (B, S, H, D) in out's dtype and l' (B, H, S) of out, lse and sinks (H,) of lse's dtype;
    all in new memory.
    """
    return _outputs(out, lse, sinks), torch.logaddexp(lse, sinks.unsqueeze(-1))


def sinks_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(H,) of these queries' o', l' and the gradient of o'."""
    delta = stack_lse_delta(out, dout, lse)[..., 1].transpose(1, 2)
    # -inf: the sink's too; inf: delta is 0
    probs = (sinks.unsqueeze(-1) - lse).exp().masked_fill(lse.isinf(), 0.0)
    return -(probs * delta).sum((0, 2))


@fused_on_gpus
def _outputs(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    share, nothing = (
        x.transpose(1, 2).unsqueeze(-1) for x in (lse - sinks.unsqueeze(-1), lse == -torch.inf)
    )
    return (out * share.sigmoid()).masked_fill(nothing, 0.0).to(out.dtype)
