"""Attention to the chosen blocks beyond the window: the far part of sparse attention.

The window of query i are the keys i - window_size to i of its document. A dense kernel computes
them. The far part are the keys before i - window_size in the chosen blocks. So each pair is in one
part, and partial outputs merge by lse.

Neighbouring queries choose nearly the same blocks, so kernels load them for several queries at
once: `torch_far.py`, and `triton_far.py` for GPUs.

The keys at hand may be a part of the sequence: blocks outside of it are left out, so that several
parts add up.

Letters: S queries, H query heads, G kv heads, D head size, N chosen blocks, T keys at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import torch_far
from .blocks import FarBlocks


def far_outputs(
    q: Tensor, k: Tensor, v: Tensor, blocks: FarBlocks, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention to the far keys among those at hand.

    q      (S, H, D)
    k, v   (T, G, D): tokens first .. first + T - 1 of the sequence
    scale  the factor of the scores

    Return out (S, H, D) and lse (H, S), natural log, in the accumulator's dtype. A query without a
    far key has an out of 0 and an lse of -inf.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from . import triton_far

        return triton_far.far_outputs(q, k, v, blocks, first, scale)
    return torch_far.far_outputs(q, k, v, blocks, first, scale)


def far_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    blocks: FarBlocks,
    first: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the share of the far keys at hand in dq, dk and dv, in the accumulator's dtype.

    dout        (S, H, D)
    lse, delta  (H, S): the logsumexp over all keys, and rowsum(out * dout), in that dtype

    Other arguments are those of `far_outputs`. Formulas are those of `Kernel.backward`.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from . import triton_far

        return triton_far.far_gradients(dout, q, k, v, lse, delta, blocks, first, scale)
    return torch_far.far_gradients(dout, q, k, v, lse, delta, blocks, first, scale)
