"""RMSNorm of tensors of any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch's CUDA kernel counts entries in 32 bits, up to torch 2.11 at least. It silently computes
# wrong values behind 2^32 of them, as 2^20 tokens of a model of width 4096 have
# (github.com/pytorch/pytorch/issues/181555).
_MOST_ENTRIES = 1 << 31


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded to x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if x.numel() < _MOST_ENTRIES:
            return F.rms_norm(x, x.shape[-1:], weight, self.eps)
        parts = x.flatten(0, -2).split(_MOST_ENTRIES // x.shape[-1] - 1)
        normed = [F.rms_norm(part, x.shape[-1:], weight, self.eps) for part in parts]
        return torch.cat(normed).view(x.shape)
