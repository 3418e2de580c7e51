"""Lightning attention in torch, in chunks: for CPUs and fp64. It specifies the other kernels.

In a chunk, tokens attend to each other as in attention without a softmax. What is before the chunk
is one state S (D, D) a head. With its `rates.Decays` and tokens t = 0 .. n - 1:

    o_t = scale * (sum_{s <= t} pairs[t, s] (q_t . k_s) v_s + before[t] S^T q_t)
    S  <- whole S + sum_t after[t] k_t v_t^T

The backward runs against time with the gradient G of the state.

Letters: T tokens, H heads, D head size, n tokens of a chunk, N states. `kernels.py` has the shapes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..base.dtypes import accumulator_dtype
from ..sequence.span import Span
from .rates import Rates, running_sum
from .segments import Segments

CHUNK = 64  # tokens


class States(NamedTuple):
    """The states next to chunks, as if there were none next to segments.

    last    (N, H, D, D) wide: the states that other runs need
    chunks  those of chunks, as a kernel keeps them: here the state that each takes, (H, D, D) wide,
            or None for 0
    """

    last: Tensor
    chunks: Any


def refuses(q: Tensor, tokens_choose: bool) -> str | None:
    """Return why the kernel cannot compute with tensors like q, or None: this one always can."""
    return None


def forward_states(k: Tensor, v: Tensor, rates: Rates, segments: Segments) -> States:
    """Return the states before chunks. `last` has, for each of `segments.leaves`, the sum of
    k_t v_t^T, decayed from t to the segment's end.
    """
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in _cut(segments.cuts, CHUNK):
        state = None if chunk.start == chunk.first else state
        chunks.append(state)
        if chunk.stop < chunk.end or chunk.segment in segments.leaves:
            keys, values = _take(k, chunk), _take(v, chunk)
            decays = rates.within(chunk.start, chunk.stop)
            found = (keys * decays.after).mT @ values
            state = found if state is None else found.add_(state * decays.whole)
            last[chunk.segment] = state
    return States(_stack(last, segments.leaves, k), chunks)


def outputs(
    q: Tensor, k: Tensor, v: Tensor, rates: Rates, scale: float,
    segments: Segments, states: States, initial: Tensor,
) -> Tensor:  # fmt: skip
    """Return out (T, H, D), scale * S_t^T q_t. Segments `segments.opens` begin with `initial`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    begins = dict(zip(segments.opens, initial, strict=True))
    for chunk, state in zip(_cut(segments.cuts, CHUNK), states.chunks, strict=True):
        queries, keys, values = (_take(x, chunk) for x in (q, k, v))
        decays = rates.within(chunk.start, chunk.stop)
        found = (queries @ keys.mT * decays.pairs) @ values
        before = _fade(begins.get(chunk.segment), rates, (chunk.first, chunk.start), state)
        if before is not None:
            found += (queries * decays.before) @ before
        out[chunk.start : chunk.stop] = (found * scale).transpose(0, 1)
    return out


def backward_states(
    q: Tensor, dout: Tensor, rates: Rates, scale: float, segments: Segments
) -> States:
    """Return the gradients of the states after chunks. `last` has, for each of `segments.opens`,
    the sum of scale q_t dout_t^T, decayed from before the segment to t.
    """
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in reversed(_cut(segments.cuts, CHUNK)):
        state = None if chunk.stop == chunk.end else state
        chunks.append(state)
        if chunk.start > chunk.first or chunk.segment in segments.opens:
            queries, grads = _take(q, chunk), _take(dout, chunk)
            decays = rates.within(chunk.start, chunk.stop)
            found = (queries * decays.before).mT @ grads * scale
            state = found if state is None else found.add_(state * decays.whole)
            last[chunk.segment] = state
    return States(_stack(last, segments.opens, q), chunks[::-1])


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, rates: Rates, scale: float,
    segments: Segments, initial: Tensor, gradient_states: States, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv (T, H, D). States after `segments.leaves` have gradients `dfinal`.
    Fill `rates.gradient` if it is not None.
    """
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    begins = dict(zip(segments.opens, initial, strict=True))
    ends = dict(zip(segments.leaves, dfinal, strict=True))
    states = forward_states(k, v, rates, segments).chunks
    chunks = zip(_cut(segments.cuts, CHUNK), states, gradient_states.chunks, strict=True)
    for chunk, state, gradient in chunks:
        queries, keys, values, dos = (_take(x, chunk) for x in (q, k, v, dout))
        decays = rates.within(chunk.start, chunk.stop)
        pairs = queries @ keys.mT * decays.pairs * scale
        dpairs = dos @ values.mT * decays.pairs * scale
        grads = dpairs @ keys, dpairs.mT @ queries, pairs.mT @ dos
        before = _fade(begins.get(chunk.segment), rates, (chunk.first, chunk.start), state)
        if before is not None:
            grads[0].add_(dos @ before.mT * decays.before * scale)
        after = _fade(ends.get(chunk.segment), rates, (chunk.stop, chunk.end), gradient)
        if after is not None:
            grads[1].add_(values @ after.mT * decays.after)
            grads[2].add_(keys @ after * decays.after)
        if rates.gradient is not None:
            # by the logarithm of the decay from key or state to query or state: those before are
            # column 0, those after the last row
            shares = functional.pad(pairs * (dos @ values.mT), (1, 0, 0, 1))
            if before is not None:
                shares[:, :-1, 0] = (queries @ before * decays.before * scale * dos).sum(2)
            if after is not None:
                shares[:, -1, 1:] = (keys @ after * decays.after * values).sum(2)
            if before is not None and after is not None:
                shares[:, -1, 0] = (before * after * decays.whole).sum((1, 2))
            # token t is in those from columns up to t to rows from t on
            crossing = running_sum(shares, 2)[..., :-1].tril().sum(1)
            rates.gradient[chunk.start : chunk.stop] = crossing.mT
        for whole, part in zip((dq, dk, dv), grads, strict=True):
            whole[chunk.start : chunk.stop] = part.transpose(0, 1)
    return dq, dk, dv


class _Chunk(NamedTuple):
    """Tokens start to stop - 1 of a segment that has tokens first to end - 1."""

    start: int
    stop: int
    segment: int
    first: int
    end: int


@functools.lru_cache(maxsize=64)  # a forward and a backward need them five times
def _cut(cuts: tuple[int, ...], most: int) -> list[_Chunk]:
    return [
        _Chunk(start, min(start + most, end), number, first, end)
        for number, (first, end) in enumerate(itertools.pairwise(cuts))
        for start in range(first, end, most)
    ]


def _take(x: Tensor, chunk: _Chunk) -> Tensor:
    """Return a chunk of x (T, H, D) as (H, n, D) wide."""
    return x[chunk.start : chunk.stop].transpose(0, 1).to(accumulator_dtype(x.dtype))


def _fade(edge: Tensor | None, rates: Rates, span: Span, state: Tensor | None) -> Tensor | None:
    """Return the state plus that at the edge of its segment, decayed over a span. None is 0."""
    if edge is None:
        return state
    faded = edge * rates.over(*span)
    return faded if state is None else faded.add_(state)


def _stack(states: dict[int, Tensor], wanted: Sequence[int], like: Tensor) -> Tensor:
    """Return the wanted states as (N, H, D, D)."""
    _, heads, size = like.shape
    none = like.new_empty(0, heads, size, size, dtype=accumulator_dtype(like.dtype))
    return torch.stack([states[segment] for segment in wanted]) if wanted else none
