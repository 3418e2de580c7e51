"""Attention to the chosen blocks beyond the window: the far part of sparse attention.

The window of query i are the keys i - window_size to i of its document. A dense kernel computes
them. The far part are the keys before i - window_size in the chosen blocks. So each pair is in one
part, and partial outputs merge by lse.

Neighbouring queries choose nearly the same blocks, so kernels load them for several queries at
once: `torch_far.py`, and `triton_far.py` for GPUs.

The keys at hand may be a part of the sequence. Blocks outside of it are left out, so several parts
add up.

Letters: S queries, H query heads, G kv heads, D head size, N chosen blocks, T keys at hand.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from . import torch_far
from .blocks import FarKeys


def add_far_outputs(q: Tensor, far: FarKeys, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the far keys among those at hand into out and lse, in place.

    q    (S, H, D)
    out  (S, H, D) in q's dtype or the accumulator's: the output so far
    lse  (H, S), natural log, in the accumulator's dtype. It is -inf where nothing was seen so far
    """
    _backend(q, far).add_far_outputs(q, far, out, lse)


def add_far_gradients(
    dout: Tensor, q: Tensor, far: FarKeys, lse_delta: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the share of the far keys at hand to dq. Return their dk and dv, in the accumulator's
    dtype.

    dout       (S, H, D)
    lse_delta  (S, H, 2), contiguous, in that dtype: the logsumexp over all keys, and rowsum(out *
               dout)
    q          (S, H, D)
    dq         (S, H, D) in that dtype

    Formulas are those of `Kernel.backward`.
    """
    dk, dv = _backend(q, far).add_far_gradients(dout, q, far, lse_delta, dq)
    return dk, dv


def _backend(q: Tensor, far: FarKeys) -> ModuleType:
    """Return the functions for such tensors: Triton's on GPUs, unless for fp64 or too large
    heads or blocks.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from . import triton_far

        if triton_far.fits(q, far.k, far.blocks.block_size):
            return triton_far
    return torch_far
