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

from types import ModuleType

import torch
from torch import Tensor

from . import torch_far
from .blocks import FarBlocks


def add_far_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: FarBlocks,
    first: int,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Merge attention to the far keys among those at hand into out and lse, in place.

    q      (S, H, D)
    k, v   (T, G, D): tokens first .. first + T - 1 of the sequence
    scale  the factor of the scores
    out    (S, H, D) in q's dtype or the accumulator's: the output so far
    lse    (H, S), natural log, in the accumulator's dtype. It is -inf where nothing was seen so far
    """
    backend = _backend(q, k, blocks)
    backend.add_far_outputs(q, k, v, blocks, first, scale, out, lse)


def add_far_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_delta: Tensor,
    blocks: FarBlocks,
    first: int,
    scale: float,
    dq: Tensor,
) -> tuple[Tensor, Tensor]:
    """Add the share of the far keys at hand to dq. Return their dk and dv, in the accumulator's
    dtype.

    dout       (S, H, D)
    lse_delta  (S, H, 2), contiguous, in that dtype: the logsumexp over all keys, and rowsum(out *
               dout)
    dq         (S, H, D) in that dtype

    Other arguments are those of `add_far_outputs`. Formulas are those of `Kernel.backward`.
    """
    backend, tensors = _backend(q, k, blocks), (dout, q, k, v, lse_delta)
    result: tuple[Tensor, Tensor] = backend.add_far_gradients(*tensors, blocks, first, scale, dq)
    return result


def _backend(q: Tensor, k: Tensor, blocks: FarBlocks) -> ModuleType:
    """Return the functions for such tensors: Triton's on GPUs, unless for fp64 or too large
    heads or blocks.
    """
    if q.is_cuda and q.dtype != torch.float64:
        from . import triton_far

        if triton_far.fits(q, k, blocks.block_size):
            return triton_far
    return torch_far
