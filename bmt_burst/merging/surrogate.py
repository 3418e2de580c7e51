"""Outputs that stand in for others in a backward, which reads out only for delta = rowsum(out *
dout).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.compiled import fused_on_gpus

_ENTRIES = 3  # of a row that differ from 0


@fused_on_gpus
def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return o' (B, S, H, D) in dout's dtype with rowsum(o' * dout) = delta (B, H, S), for kernels
    that need out.

    If the softmax is saturated, dP and delta nearly cancel in dq. So the row sum must match delta
    far better than the rounding of o' allows. Therefore only a few entries of o'
    differ from 0. The entry with the largest |dout| carries as much as its rounding allows, and the
    next ones carry the rest. Three entries leave an error below fp32's. In fp16, whose smallest
    numbers are not small, the error is about 1e-4 if delta is small beside |dout|, as from rounding
    out.
    """
    wide = dout.to(delta.dtype)
    magnitude, rest = wide.abs(), delta.transpose(1, 2).unsqueeze(-1)
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
