"""Lightning attention of new tokens that continue a state, for generation on one process.

Letters: B batch, S new tokens, H heads, D head size.
"""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..base.autocast import without_autocast
from ..base.compiled import not_compiled
from ..base.dtypes import accumulator_dtype
from . import kernels
from .segments import Segments
from .slopes import decay, send_slopes


@runtime_checkable
class StateCache(Protocol):
    """A cache of generation that keeps the states of lightning layers.

    It begins with an empty dict. The layers fill it.
    """

    states: dict[int, Tensor]  # by layer, (B, H, D, D) in fp32, or fp64 for fp64 inputs


@not_compiled
@torch.no_grad()
def continue_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: tuple[float, ...],
    scale: float,
    state: Tensor | None,
    flash: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the lightning attention (B, S, H, D) of new tokens, and each row's state after them,
    (B, H, D, D). There is no gradient.

    q, k, v  (B, S, H, D)
    slopes   those of the heads
    state    that of each row before these tokens, or None at the beginning
    flash    the kernel, as in lightning_attn_func

    Raises ValueError for no tokens, a state of another shape, dtype or device, or a kernel that
    cannot compute with q, TypeError for a kernel that is no string.
    """
    batch, tokens = q.shape[:2]
    _check_state(q, state)
    segments = _make_segments(batch, tokens, state is not None)
    kernel = kernels.load(kernels.pick(flash, q))
    flat_q, flat_k, flat_v = (x.flatten(0, 1).contiguous() for x in (q, k, v))
    # kernels rely on q's GPU being the current one
    with torch.cuda.device_of(q), without_autocast(q):
        sent = send_slopes(segments, slopes, q)
        states = kernel.forward_states(flat_k, flat_v, sent, segments)
        initial = states.last[:0] if state is None else state.contiguous()
        out = kernel.outputs(flat_q, flat_k, flat_v, sent, scale, segments, states, initial)
        after = states.last
        if state is not None:
            after = after + state * decay(sent, torch.full((1, 1), tokens, device=q.device))
    return out.view(q.shape), after


def _check_state(q: Tensor, state: Tensor | None) -> None:
    batch, tokens, heads, size = q.shape
    if tokens < 1:
        raise ValueError("expected one or more new tokens, got none")
    expected = (batch, heads, size, size), accumulator_dtype(q.dtype), q.device
    if state is not None and (tuple(state.shape), state.dtype, state.device) != expected:
        raise ValueError(
            f"expected states {expected[0]} in {expected[1]} on {expected[2]} to continue, got "
            f"{tuple(state.shape)} in {state.dtype} on {state.device}: begin another StateCache "
            "for other rows"
        )


@functools.lru_cache(maxsize=64)  # kernels keep what they prepare for segments
def _make_segments(batch: int, tokens: int, is_open: bool) -> Segments:
    """Return a segment for each row, which leaves its state."""
    rows = tuple(range(batch))
    cuts = tuple(range(0, batch * tokens + 1, tokens))
    return Segments(cuts, opens=rows if is_open else (), leaves=rows)
