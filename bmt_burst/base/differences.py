"""The difference between two runs of the same computation, compared with rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from .dtypes import accumulator_dtype


def find_difference(x: Tensor, kept: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the difference of two tensors, relative to the most that rounding to `dtype`, by
    default that of `kept`, does.

    Runs with the same kernels are equal. A compiled model rounds elsewhere without a graph: in tens
    of layers that adds up to several eps in an entry, but not in a scale of all, where independent
    roundings cancel. A scale of fp32 may differ by products in TF32.
    """
    eps = torch.finfo(dtype or kept.dtype).eps
    x, kept = (t.to(accumulator_dtype(kept.dtype)) for t in (x, kept))
    if not kept.numel():
        return kept.new_zeros(())
    apart, tiny = x - kept, torch.finfo(kept.dtype).tiny
    of_entry = apart.abs().amax() / kept.abs().amax().clamp_min(tiny)
    of_scale = (apart * kept).sum().abs() / kept.square().sum().clamp_min(tiny)
    return torch.maximum(of_entry / eps**0.5, of_scale / max(2 * eps, 1e-5))
