"""Lightning attention in torch, in chunks: for CPUs and fp64. It specifies the other kernels.

In a chunk, tokens attend to each other as in attention without a softmax. What is before the chunk
is one state S (D, D) a head. With decay d = e^(-slope) and tokens t = 0 .. n - 1 of a chunk:

    o_t = scale * (sum_{s <= t} d^(t - s) (q_t . k_s) v_s + d^(t + 1) S^T q_t)
    S  <- d^n S + sum_t d^(n - 1 - t) k_t v_t^T

The backward runs against time with the gradient G of the state. All exponents of d are at least 0.

Letters: T tokens, H heads, D head size, n tokens of a chunk, N states. `kernels.py` has the shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from .rates import decay
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


def refuses(q: Tensor) -> str | None:
    """Return why the kernel cannot compute with tensors like q, or None: this one always can."""
    return None


def forward_states(k: Tensor, v: Tensor, slopes: Tensor, segments: Segments) -> States:
    """Return the states before chunks. `last` has, for each of `segments.leaves`, the sum of
    e^(-slope (end - 1 - t)) k_t v_t^T.
    """
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in _cut(segments):
        state = None if chunk.start == chunk.first else state
        chunks.append(state)
        if chunk.stop < chunk.end or chunk.segment in segments.leaves:
            keys, values = _take(k, chunk), _take(v, chunk)
            decays = _decays(slopes, chunk)
            state = _add(state, decays.whole, (keys * decays.after).mT @ values)
            last[chunk.segment] = state
    return States(_stack(last, segments.leaves, k), chunks)


def outputs(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float,
    segments: Segments, states: States, initial: Tensor,
) -> Tensor:  # fmt: skip
    """Return out (T, H, D), scale * S_t^T q_t. Segments `segments.opens` begin with `initial`."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    begins = dict(zip(segments.opens, initial, strict=True))
    for chunk, state in zip(_cut(segments), states.chunks, strict=True):
        queries, keys, values = (_take(x, chunk) for x in (q, k, v))
        decays = _decays(slopes, chunk)
        found = (queries @ keys.mT * decays.pairs) @ values
        before = _fade(begins.get(chunk.segment), slopes, chunk.start - chunk.first, state)
        if before is not None:
            found += (queries * decays.before) @ before
        out[chunk.start : chunk.stop] = (found * scale).transpose(0, 1)
    return out


def backward_states(
    q: Tensor, dout: Tensor, slopes: Tensor, scale: float, segments: Segments
) -> States:
    """Return the gradients of the states after chunks. `last` has, for each of `segments.opens`,
    the sum of scale e^(-slope (t - start + 1)) q_t dout_t^T.
    """
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in reversed(_cut(segments)):
        state = None if chunk.stop == chunk.end else state
        chunks.append(state)
        if chunk.start > chunk.first or chunk.segment in segments.opens:
            queries, grads = _take(q, chunk), _take(dout, chunk)
            decays = _decays(slopes, chunk)
            state = _add(state, decays.whole, (queries * decays.before).mT @ grads * scale)
            last[chunk.segment] = state
    return States(_stack(last, segments.opens, q), chunks[::-1])


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, slopes: Tensor, scale: float,
    segments: Segments, initial: Tensor, gradient_states: States, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv (T, H, D). States after `segments.leaves` have gradients `dfinal`."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    begins = dict(zip(segments.opens, initial, strict=True))
    ends = dict(zip(segments.leaves, dfinal, strict=True))
    states = forward_states(k, v, slopes, segments).chunks
    for chunk, state, gradient in zip(_cut(segments), states, gradient_states.chunks, strict=True):
        queries, keys, values, dos = (_take(x, chunk) for x in (q, k, v, dout))
        decays = _decays(slopes, chunk)
        pairs = queries @ keys.mT * decays.pairs * scale
        dpairs = dos @ values.mT * decays.pairs * scale
        grads = dpairs @ keys, dpairs.mT @ queries, pairs.mT @ dos
        before = _fade(begins.get(chunk.segment), slopes, chunk.start - chunk.first, state)
        if before is not None:
            grads[0].add_(dos @ before.mT * decays.before * scale)
        after = _fade(ends.get(chunk.segment), slopes, chunk.end - chunk.stop, gradient)
        if after is not None:
            grads[1].add_(values @ after.mT * decays.after)
            grads[2].add_(keys @ after * decays.after)
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


def _cut(segments: Segments) -> list[_Chunk]:
    return [
        _Chunk(start, min(start + CHUNK, end), number, first, end)
        for number, (first, end) in enumerate(itertools.pairwise(segments.cuts))
        for start in range(first, end, CHUNK)
    ]


class _Decays(NamedTuple):
    """The decays in a chunk of n tokens.

    before  (H, n, 1): from the state before the chunk to each token
    after   (H, n, 1): from each token to the state after the chunk
    pairs   (H, n, n): from key to query, 0 for later keys
    whole   (H, 1, 1): over the chunk
    """

    before: Tensor
    after: Tensor
    pairs: Tensor
    whole: Tensor


def _decays(slopes: Tensor, chunk: _Chunk) -> _Decays:
    n = chunk.stop - chunk.start
    t = torch.arange(n, device=slopes.device).unsqueeze(1)
    pairs = decay(slopes, (t - t.mT).clamp_min(0)).tril()
    return _Decays(decay(slopes, t + 1), decay(slopes, n - 1 - t), pairs, decay(slopes, t[:1] + n))


def _take(x: Tensor, chunk: _Chunk) -> Tensor:
    """Return a chunk of x (T, H, D) as (H, n, D) wide."""
    return x[chunk.start : chunk.stop].transpose(0, 1).to(accumulator_dtype(x.dtype))


def _add(state: Tensor | None, whole: Tensor, found: Tensor) -> Tensor:
    return found if state is None else found.add_(state * whole)


def _fade(edge: Tensor | None, slopes: Tensor, tokens: int, state: Tensor | None) -> Tensor | None:
    """Return the state plus that at the edge of its segment, decayed over `tokens`. None is 0."""
    if edge is None:
        return state
    faded = edge * decay(slopes, torch.full((1, 1), tokens, device=slopes.device))
    return faded if state is None else faded.add_(state)


def _stack(states: dict[int, Tensor], wanted: Sequence[int], like: Tensor) -> Tensor:
    """Return the wanted states as (N, H, D, D)."""
    _, heads, size = like.shape
    none = like.new_empty(0, heads, size, size, dtype=accumulator_dtype(like.dtype))
    return torch.stack([states[segment] for segment in wanted]) if wanted else none
