"""Surrogates of out in a backward.

A backward reads out only for delta = rowsum(out * dout). Any tensor with the same delta will do:

- for kernels that need out, where only delta was sent (`surrogate_out`);
- for the gradient of lse (`add_lse_gradient`). With P_ij = exp(score_ij - lse_i), the derivative of
  lse_i by score_ij is P_ij. So with a gradient dlse of lse, dS = P (dP - delta + dlse): only delta
  changes. Strategies, kernels and sinks need not know it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus
from .merge import stack_lse_delta
from .parts import by_token

_ENTRIES = 3  # of a row that differ from 0


def add_lse_gradient(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an out and dout (B, S, H, D), new memory, with which a backward also has the gradient
    dlse (B, H, S) of lse.

    dlse has no effect where lse is -inf, which is a constant. dout changes only where it is nearly
    0 compared with dlse: no out can change its row sum there. The change is below 1e-4 of dlse in
    fp16, and 1e-18 otherwise.
    """
    dlse = dlse.to(lse.dtype).masked_fill(lse == -torch.inf, 0.0)
    dout = _floor_rows(dout, dlse)
    delta = stack_lse_delta(out, dout, lse)[..., 1].transpose(1, 2)
    return surrogate_out(dout, delta - dlse), dout


@fused_on_gpus
def _floor_rows(dout: Tensor, dlse: Tensor) -> Tensor:
    """Return dout, with small entries in rows where all are too small for a surrogate of dlse."""
    dtype = torch.finfo(dout.dtype)
    # the least entry with which entries of out that the dtype holds can make up for dlse
    least = dlse.abs() * max(2 / dtype.max, 2.0**-60)
    least = by_token(least.clamp_min(dtype.tiny * dtype.eps))
    too_small = dout.abs().amax(-1, keepdim=True) < least
    too_small &= by_token(dlse) != 0
    # Different entries: the surrogate rounds each, and carries the rest in the next.
    entries = least * torch.exp2(-torch.arange(dout.shape[-1], device=dout.device).to(least.dtype))
    return torch.where(too_small, entries.to(dout.dtype), dout)


# Without the rounding of its entries, nothing would be left for the second one and the third.
@functools.partial(fused_on_gpus, keeps_casts=True)
def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return o' (B, S, H, D) in dout's dtype with rowsum(o' * dout) = delta (B, H, S), for kernels
    that need out.

    If the softmax is saturated, dP and delta nearly cancel in dq. So the row sum must match delta
    far better than the rounding of o' allows. Therefore only a few entries of o' differ from 0. The
    entry with the largest |dout| carries as much as its rounding allows, and the next ones carry
    the rest. Three entries leave an error below fp32's. In fp16, which has no very small numbers,
    the error is about 1e-4 if delta is small compared with |dout|, as from rounding out.
    """
    wide = dout.to(delta.dtype)
    magnitude, rest = wide.abs(), by_token(delta)
    out, most = torch.zeros_like(dout), torch.finfo(dout.dtype).max
    for _ in range(_ENTRIES):
        largest = magnitude.amax(-1, keepdim=True)
        carrying = (magnitude == largest) & (largest > 0)  # several if entries are equal
        divisor = largest * carrying.sum(-1, keepdim=True)
        part = (rest / divisor).where(divisor > 0, 0.0).clamp(-most, most).to(dout.dtype)
        out = torch.where(carrying, part * dout.sign(), out)
        rest = rest - part.to(delta.dtype) * divisor
        magnitude = magnitude.masked_fill(carrying, 0.0)
    return out
