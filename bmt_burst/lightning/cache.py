"""Lightning attention of new tokens that continue a state, for generation on one process.

Letters: B batch, S new tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.dtypes import accumulator_dtype
from . import kernels
from .segments import Segments
from .slopes import decay


@runtime_checkable
class StateCache(Protocol):
    """A cache of generation that keeps the states of lightning layers.

    It begins with an empty dict. The layers fill it.
    """

    states: dict[int, Tensor]  # by layer, (B, H, D, D) in fp32, or fp64 for fp64 inputs


@torch.no_grad()
def continue_state(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the lightning attention (B, S, H, D) of new tokens, and each row's state after them,
    (B, H, D, D). There is no gradient.

    q, k, v  (B, S, H, D), S at least 1
    slopes   (H,) in the accumulator's dtype of q's, on q's device
    state    that of each row before these tokens, or None at the beginning

    Raises ValueError for no tokens, and for a state of other rows, heads or inputs.
    """
    batch, tokens = q.shape[:2]
    _check_state(q, state)
    segments = _make_segments(batch, tokens, state is not None)
    kernel = kernels.load(kernels.pick("auto", q))
    flat_q, flat_k, flat_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    with without_autocast(q):
        states = kernel.forward_states(flat_k, flat_v, slopes, segments)
        initial = states.last[:0] if state is None else state
        out = kernel.outputs(flat_q, flat_k, flat_v, slopes, scale, segments, states, initial)
        after = states.last
        if state is not None:
            after = after + state * decay(slopes, torch.full((1, 1), tokens, device=q.device))
    return out.view(q.shape), after


def _check_state(q: Tensor, state: Tensor | None) -> None:
    batch, tokens, heads, size = q.shape
    if not tokens:
        raise ValueError("expected new tokens to continue a state, got none")
    shape, dtype = (batch, heads, size, size), accumulator_dtype(q.dtype)
    if state is not None and (state.shape, state.dtype) != (shape, dtype):
        raise ValueError(
            f"expected a state of shape {shape} and {dtype} to continue, got {tuple(state.shape)} "
            f"and {state.dtype}: make a cache for each batch of sequences"
        )


@functools.lru_cache(maxsize=64)  # kernels keep what they prepare for segments
def _make_segments(batch: int, tokens: int, is_open: bool) -> Segments:
    """Return a segment for each row, which leaves its state."""
    rows = tuple(range(batch))
    cuts = tuple(range(0, batch * tokens + 1, tokens))
    return Segments(cuts, opens=rows if is_open else (), leaves=rows)
