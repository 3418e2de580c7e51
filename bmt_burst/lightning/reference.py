"""Lightning attention in torch, in chunks: for CPUs and fp64. It specifies the other kernels.

In a chunk, tokens attend to each other as in attention without a softmax. What is before the chunk
is one state S (D, D) a head. With decay d = e^(-slope) and tokens t = 0 .. n - 1 of a chunk:

    o_t = scale * (sum_{s <= t} d^(t - s) (q_t . k_s) v_s + d^(t + 1) S^T q_t)
    S  <- d^n S + sum_t d^(n - 1 - t) k_t v_t^T

The backward runs against time with the gradient G of the state. All exponents of d are at least 0.

Letters: T tokens, H heads, D head size, n tokens of a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from .segments import Segments
from .slopes import decay

CHUNK = 64  # tokens


@dataclass
class States:
    """The states next to chunks, as if all segments began with 0.

    last    (N, H, D, D) wide: the last states of the segments that the caller needs
    chunks  the state that each chunk takes, (H, D, D) wide, None if it is 0
    """

    last: Tensor
    chunks: list[Tensor | None]


class _Chunk(NamedTuple):
    """Tokens start to stop - 1 of a segment that has tokens first to end - 1."""

    start: int
    stop: int
    segment: int
    first: int
    end: int


def refuses(q: Tensor) -> str | None:
    """Return None: this kernel takes all inputs."""
    return None


def forward_states(k: Tensor, v: Tensor, slopes: Tensor, segments: Segments) -> States:
    """Return the states before chunks, and last those after `segments.leaves`."""
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in _cut(segments):
        if chunk.start == chunk.first:
            state = None
        chunks.append(state)
        if chunk.stop < chunk.end or chunk.segment in segments.leaves:
            keys, values = _take(k, chunk), _take(v, chunk)
            decays = _decays(slopes, chunk.stop - chunk.start)
            state = _add(state, decays.whole, (keys * decays.after).mT @ values)
            last[chunk.segment] = state
    return States(_stack(last, segments.leaves, k), chunks)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    scale: float,
    segments: Segments,
    states: States,
    initial: Tensor,
) -> Tensor:
    """Return out (T, H, D). The segments `segments.opens` begin with `initial` (N, H, D, D)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    before = _begin(states, slopes, segments, initial)
    for chunk, state in zip(_cut(segments), before, strict=True):
        queries, keys, values = (_take(x, chunk) for x in (q, k, v))
        decays = _decays(slopes, chunk.stop - chunk.start)
        found = (queries @ keys.mT * decays.pairs) @ values
        if state is not None:
            found += (queries * decays.before) @ state
        _put(out, chunk, found * scale)
    return out


def backward_states(
    q: Tensor, dout: Tensor, slopes: Tensor, scale: float, segments: Segments
) -> States:
    """Return the gradients of the states after chunks, and last those before `segments.opens`."""
    chunks, last = list[Tensor | None](), dict[int, Tensor]()
    state = None
    for chunk in reversed(_cut(segments)):
        if chunk.stop == chunk.end:
            state = None
        chunks.append(state)
        if chunk.start > chunk.first or chunk.segment in segments.opens:
            queries, grads = _take(q, chunk), _take(dout, chunk)
            decays = _decays(slopes, chunk.stop - chunk.start)
            state = _add(state, decays.whole, (queries * decays.before).mT @ grads * scale)
            last[chunk.segment] = state
    return States(_stack(last, segments.opens, q), chunks[::-1])


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    slopes: Tensor,
    scale: float,
    segments: Segments,
    initial: Tensor,
    gradient_states: States,
    dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv (T, H, D). `dfinal` (N, H, D, D) are the gradients of the states after
    `segments.leaves`.
    """
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    states = forward_states(k, v, slopes, segments)
    before = _begin(states, slopes, segments, initial)
    after = _end(gradient_states, slopes, segments, dfinal)
    for chunk, state, gradient in zip(_cut(segments), before, after, strict=True):
        queries, keys, values, dos = (_take(x, chunk) for x in (q, k, v, dout))
        decays = _decays(slopes, chunk.stop - chunk.start)
        pairs = queries @ keys.mT * decays.pairs * scale
        dpairs = dos @ values.mT * decays.pairs * scale
        dq, dk, dv = dpairs @ keys, dpairs.mT @ queries, pairs.mT @ dos
        if state is not None:
            dq += dos @ state.mT * decays.before * scale
        if gradient is not None:
            dk += values @ gradient.mT * decays.after
            dv += keys @ gradient * decays.after
        for whole, found in zip(grads, (dq, dk, dv), strict=True):
            _put(whole, chunk, found)
    return grads[0], grads[1], grads[2]


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


def _decays(slopes: Tensor, n: int) -> _Decays:
    t = torch.arange(n, device=slopes.device)
    distances = (t.unsqueeze(1) - t).clamp_min(0)
    return _Decays(
        decay(slopes, t + 1).unsqueeze(2),
        decay(slopes, n - 1 - t).unsqueeze(2),
        decay(slopes, distances).tril(),
        decay(slopes, t[:1] + n).unsqueeze(2),
    )


def _cut(segments: Segments) -> list[_Chunk]:
    return [
        _Chunk(start, min(start + CHUNK, end), number, first, end)
        for number, (first, end) in enumerate(itertools.pairwise(segments.cuts))
        for start in range(first, end, CHUNK)
    ]


def _take(x: Tensor, chunk: _Chunk) -> Tensor:
    """Return a chunk of x (T, H, D) as (H, n, D) wide."""
    return x[chunk.start : chunk.stop].transpose(0, 1).to(accumulator_dtype(x.dtype))


def _put(x: Tensor, chunk: _Chunk, found: Tensor) -> None:
    x[chunk.start : chunk.stop] = found.transpose(0, 1)


def _add(state: Tensor | None, whole: Tensor, found: Tensor) -> Tensor:
    return found if state is None else found.add_(state * whole)


def _stack(states: dict[int, Tensor], wanted: Sequence[int], like: Tensor) -> Tensor:
    """Return the wanted states as (N, H, D, D)."""
    _, heads, size = like.shape
    none = like.new_empty(0, heads, size, size, dtype=accumulator_dtype(like.dtype))
    return torch.stack([states[segment] for segment in wanted]) if wanted else none


def _begin(
    states: States, slopes: Tensor, segments: Segments, initial: Tensor
) -> Iterator[Tensor | None]:
    """Yield the state before each chunk, with the decayed `initial` of its segment."""
    of_segment = dict(zip(segments.opens, initial, strict=True))
    for chunk, state in zip(_cut(segments), states.chunks, strict=True):
        yield _with(state, of_segment.get(chunk.segment), slopes, chunk.start - chunk.first)


def _end(
    states: States, slopes: Tensor, segments: Segments, dfinal: Tensor
) -> Iterator[Tensor | None]:
    """Yield the gradient of the state after each chunk, with the decayed `dfinal` of its
    segment.
    """
    of_segment = dict(zip(segments.leaves, dfinal, strict=True))
    for chunk, state in zip(_cut(segments), states.chunks, strict=True):
        yield _with(state, of_segment.get(chunk.segment), slopes, chunk.end - chunk.stop)


def _with(state: Tensor | None, other: Tensor | None, slopes: Tensor, tokens: int) -> Tensor | None:
    """Return the state plus another one that decayed over `tokens`. None is 0."""
    if other is None:
        return state
    faded = other * decay(slopes, torch.tensor([[tokens]], device=slopes.device))
    return faded if state is None else state + faded
