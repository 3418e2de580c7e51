"""The bias in the Triton kernels of `triton_blocks.py`: its terms, and its table's gradient.

A pair's row of the table depends on its distance alone, or on segments: see `CallBias`. The
gradient is summed in 64-bit integers, so that the result does not depend on the order. By segments
`backward_q` sums it, by distance `backward_table`, whose programs follow diagonals.
`triton_blocks.py` explains the letters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.triton_blocks import NUMBERS, ROWS, dscores_of, probs_of, scores_of, visible_pairs
from ...kernels.triton_memory import load_lse, load_row, read, row_at, token_at, wide

# Up to this many rows, summing a block's pairs of each row is faster than adding each pair.
_FEW_ROWS = tl.constexpr(48)


@triton.jit
def first_distance(bias, q_start, q_count, kv_start, kv_count):
    """Load the position of a sequence's first key minus that of its first query."""
    query = tl.load(bias.q_position + q_start, mask=q_count > 0, other=0)
    key = tl.load(bias.kv_position + kv_start, mask=kv_count > 0, other=0)
    return key - query


@triton.jit
def _spread(queries, keys, TRANSPOSED: tl.constexpr):
    """Return queries as a column and keys as a row, or the other way round if TRANSPOSED."""
    OF_KEYS: tl.constexpr = 1 if TRANSPOSED else 0
    return tl.expand_dims(queries, 1 - OF_KEYS), tl.expand_dims(keys, OF_KEYS)


@triton.jit
def by_distance(
    bias, head, apart, first, at,
    OWN: tl.constexpr, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load the terms (OWN, OTHER), to base 2, of own tokens first .. and other tokens at ..

    Own tokens are keys if TRANSPOSED, else queries. `apart` is the sequence's `first_distance`.
    Indices of the table become positive before they are added to the pointer, because Triton 3.6
    computed wrong addresses from negative ones.
    """
    M: tl.constexpr = OTHER if TRANSPOSED else OWN
    N: tl.constexpr = OWN if TRANSPOSED else OTHER
    if TRANSPOSED:
        first, at = at, first
    biases, middle = bias.biases + head * (bias.rows + 2 * bias.reach + 1), bias.rows + bias.reach
    # A block whose pairs are all beyond reach may be moved nearer, if they all stay beyond it.
    distance = tl.minimum(tl.maximum(apart + at - first, M - bias.reach), bias.reach - N)
    query, key = _spread(tl.arange(0, M), tl.arange(0, N), TRANSPOSED)
    return tl.load(biases + (middle + distance + key - query))


class Fields(NamedTuple):
    """The bias's fields of tokens first .. first + count - 1 of one side, of SIZE tokens at most.

    groups, segments, positions  (SIZE,); segments are bases on the queries' side
    group, segment               of the first token
    uniform                      whether all tokens have this group and segment
    """

    groups: tl.tensor
    segments: tl.tensor
    positions: tl.tensor
    group: tl.tensor
    segment: tl.tensor
    uniform: tl.tensor
    first: tl.tensor
    count: tl.tensor


@triton.jit
def _fields(bias, first, count, SIZE: tl.constexpr, OF_KEYS: tl.constexpr):
    """Load the fields of keys or queries first .. first + count - 1."""
    if OF_KEYS:
        groups, segments, positions = bias.kv_group, bias.kv_segment, bias.kv_position
    else:
        groups, segments, positions = bias.q_group, bias.q_base, bias.q_position
    token = tl.arange(0, SIZE)
    group, segment = tl.load(groups + first), tl.load(segments + first)
    all_groups = tl.load(groups + first + token, mask=token < count, other=group)
    all_segments = tl.load(segments + first + token, mask=token < count, other=segment)
    all_positions = tl.load(positions + first + token, mask=token < count, other=0)
    differ = tl.max(((all_groups != group) | (all_segments != segment)).to(tl.int32), 0)
    tokens = all_groups, all_segments, all_positions
    return Fields(*tokens, group, segment, differ == 0, first, count)


@triton.jit
def by_segments(bias, head, queries, keys, TRANSPOSED: tl.constexpr):
    """Load the terms, to base 2: (M, N), or (N, M) if TRANSPOSED."""
    biases = bias.biases + head * (bias.rows + 2 * bias.reach + 1)
    q_positions, kv_positions = _spread(queries.positions, keys.positions, TRANSPOSED)
    near = bias.rows + bias.reach + _clamp(kv_positions - q_positions, bias.reach)
    if queries.uniform & keys.uniform:
        entry, same = bias.pairs + queries.segment + keys.segment, queries.group == keys.group
        row = tl.load(entry, mask=same, other=bias.other)
        result = tl.load(biases + tl.where(row < 0, near, row))
    else:
        rows = _pair_rows(bias, queries, keys, TRANSPOSED)
        result = tl.load(biases + tl.where(rows < 0, near, rows))
    return result


@triton.jit
def _pair_rows(bias, queries, keys, TRANSPOSED: tl.constexpr):
    """Load each pair's row of the table, negative if the pair goes by distance."""
    q_groups, kv_groups = _spread(queries.groups, keys.groups, TRANSPOSED)
    bases, segments = _spread(queries.segments, keys.segments, TRANSPOSED)
    return tl.load(bias.pairs + (bases + segments), mask=q_groups == kv_groups, other=bias.other)


@triton.jit
def _clamp(distance, reach):
    return tl.minimum(tl.maximum(distance, -reach), reach)


@triton.jit
def add_by_distance(bias, head, dscores, distances):
    """Add dscores (M, N) to the sums of their rows, which depend on distance."""
    sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
    rows = tl.load(bias.distances + (bias.reach + _clamp(distances, bias.reach)))
    first, last = tl.min(tl.min(rows, 1), 0), tl.max(tl.max(rows, 1), 0)
    if last - first < _FEW_ROWS:
        for row in tl.range(first, last + 1):
            total = tl.sum(tl.sum(tl.where(rows == row, dscores, 0.0), 1), 0)
            tl.atomic_add(sums + row, _whole(total, unit), mask=total != 0.0, sem="relaxed")
    else:
        tl.atomic_add(sums + rows, _whole(dscores, unit), mask=dscores != 0.0, sem="relaxed")


@triton.jit
def add_near(bias, head, dscores, queries, keys, M: tl.constexpr):
    """Add the dscores (M, N) of pairs that go by distance, for keys of one segment. Return (M,) the
    sum of each query's other dscores.
    """
    same = queries.groups == keys.group
    rows = tl.load(bias.pairs + (queries.segments + keys.segment), mask=same, other=bias.other)
    near = _existing(queries, M) & (rows < 0)
    if tl.max(near.to(tl.int32), 0) > 0:
        distances = keys.positions[None, :] - queries.positions[:, None]
        add_by_distance(bias, head, tl.where(near[:, None], dscores, 0.0), distances)
    return tl.sum(tl.where(near[:, None], 0.0, dscores), 1)


@triton.jit
def _finish(bias, head, state, M: tl.constexpr):
    """Add the sums that wait to the rows of their queries and one segment of keys."""
    if bias.pairs is not None:
        _, queries, waiting, group, segment = state
        some = _existing(queries, M) & (waiting != 0.0)
        same = some & (queries.groups == group)
        rows = tl.load(bias.pairs + (queries.segments + segment), mask=same, other=bias.other)
        sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
        tl.atomic_add(sums + rows, _whole(waiting, unit), mask=some, sem="relaxed")


@triton.jit
def _existing(fields, SIZE: tl.constexpr):
    """Return (SIZE,): which tokens of a block exist."""
    # with a key of inf the gradients of missing tokens' scores are NaN, and must not be added
    return tl.arange(0, SIZE) < fields.count


@triton.jit
def add_by_segments(bias, head, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Add dscores (M, N) to the sums of their rows, which depend on segments."""
    rows = _pair_rows(bias, queries, keys, False)
    near = tl.where(_existing(queries, M)[:, None] & (rows < 0), dscores, 0.0)
    if tl.max(tl.max((near != 0.0).to(tl.int32), 1), 0) > 0:
        add_by_distance(bias, head, near, keys.positions[None, :] - queries.positions[:, None])
    if tl.max(tl.max(rows, 1), 0) >= 0:
        sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
        _add_by_runs(sums, unit, bias, tl.where(rows < 0, 0.0, dscores), queries, keys, M, N)


@triton.jit
def _add_by_runs(sums, unit, bias, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Add dscores (M, N), 0 for pairs by distance. Sum queries of a run, which have equal rows."""
    token = tl.arange(0, M)
    start = 0
    while start < queries.count:
        group = tl.load(bias.q_group + queries.first + start)
        base = tl.load(bias.q_base + queries.first + start)
        others = (token >= start) & ((queries.groups != group) | (queries.segments != base))
        stop = tl.min(tl.where(others, token, queries.count), 0)
        total = tl.sum(tl.where(((token >= start) & (token < stop))[:, None], dscores, 0.0), 0)
        same = keys.groups == group
        row = tl.load(bias.pairs + (base + keys.segments), mask=same, other=bias.other)
        tl.atomic_add(sums + row, _whole(total, unit), mask=row >= 0, sem="relaxed")
        start = stop


@triton.jit
def _whole(x, unit):
    """Round x to the nearest number of units."""
    return tl.floor(x * unit + 0.5).to(tl.int64)


@triton.jit
def _start(bias, head, block, at, OWN: tl.constexpr, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return a program's state: by distance the terms of its first blocks, else fields and sums."""
    first, own_start, own_count, other_start, other_count = block
    if bias.pairs is None:
        if TRANSPOSED:
            apart = first_distance(bias, other_start, other_count, own_start, own_count)
        else:
            apart = first_distance(bias, own_start, own_count, other_start, other_count)
        added = by_distance(bias, head, apart, first, at, OWN, OTHER, TRANSPOSED)
        return first, apart, added
    else:  # noqa: RET505 - Triton compiles one branch, and all that follows
        own = _fields(bias, own_start + first, tl.minimum(own_count - first, OWN), OWN, TRANSPOSED)
        zero = tl.full((), 0, tl.int32)
        return other_start, own, tl.zeros((OWN,), tl.float32), zero, zero


@triton.jit
def _add(
    bias, head, state, scores, at, others,
    OWN: tl.constexpr, OTHER: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Add the terms of a pair of blocks. By distance, load those of the next pair, too."""
    other = ()
    if bias.pairs is None:
        first, apart, added = state
        scores += added
        added = by_distance(bias, head, apart, first, at + OTHER, OWN, OTHER, TRANSPOSED)
        state = first, apart, added
    else:
        own, count = state[1], tl.minimum(others, OTHER)
        other = _fields(bias, state[0] + at, count, OTHER, not TRANSPOSED)
        if TRANSPOSED:
            scores += by_segments(bias, head, other, own, True)
        else:
            scores += by_segments(bias, head, own, other, False)
    return scores, state, other


@triton.jit
def _sum(bias, head, state, dscores, keys, M: tl.constexpr, N: tl.constexpr):
    """Add dscores (M, N) by segments to the sums of their rows, or let them wait for others."""
    if bias.pairs is not None:
        kv_start, own, waiting, group, segment = state
        if keys.uniform:
            if (keys.group != group) | (keys.segment != segment):
                _finish(bias, head, state, M)
                waiting = tl.zeros((M,), tl.float32)
                group, segment = keys.group, keys.segment
            waiting += add_near(bias, head, dscores, own, keys, M)
        else:
            add_by_segments(bias, head, dscores, own, keys, M, N)
        state = kv_start, own, waiting, group, segment
    return state


class BiasArguments(NamedTuple):
    """The `terms` of the kernels for a `CallBias`.

    distances    (2 reach + 1,) int32: rows; reach includes a padding of equal rows at both ends
    biases       (H, R + 2 reach + 1) fp32, to base 2: the table, then its rows by distance
    sums         (H, R) int64: the gradient times unit
    unit         (H,) fp32
    others       None if all pairs go by distance
    start .. finish  the functions of the kernels' contract
    """

    q_position: tl.tensor
    kv_position: tl.tensor
    distances: tl.tensor
    biases: tl.tensor
    rows: int
    reach: int
    q_group: tl.tensor | None = None
    q_base: tl.tensor | None = None
    kv_group: tl.tensor | None = None
    kv_segment: tl.tensor | None = None
    pairs: tl.tensor | None = None
    other: int | None = None
    sums: tl.tensor | None = None
    unit: tl.tensor | None = None
    start: Any = _start
    add: Any = _add
    sum: Any = _sum
    finish: Any = _finish


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_table(
    q, k, v, dout, lse, delta,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    walks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    TERMS: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Add the share of the blocks along one diagonal to the gradient of a bias by distance. They
    have the same distances, so dscores are summed over them, and the sums are added once.
    """
    head, batch, walk = tl.program_id(1), tl.program_id(2), walks + tl.program_id(0) * 7
    start, steps, ahead = tl.load(walk), tl.load(walk + 1), tl.load(walk + 2)
    q_start, q_count = tl.load(walk + 3), tl.load(walk + 4)
    kv_start, kv_count = tl.load(walk + 5), tl.load(walk + 6)
    more = kv_count - q_count
    q_rows = token_at(q, q_strides, batch, head, q_start)
    dout_rows = token_at(dout, dout_strides, batch, head, q_start)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)
    lse_rows = row_at(lse, lse_strides, batch, head, q_start)
    delta_rows = row_at(delta, delta_strides, batch, head, q_start)
    apart = first_distance(bias, q_start, q_count, kv_start, kv_count)
    added = by_distance(bias, head, apart, start, start + ahead, M, N, False)
    sums = tl.zeros((M, N), tl.float32)
    for first in tl.range(start, start + steps * M, M):
        at = first + ahead  # the first key, which may be before the sequence
        rows, columns = q_count - first, kv_count - at
        q_block = read(q_rows, q_strides, first, rows, D, WIDTH, M, True)
        k_block = _load_between(k_rows, k_strides, at, columns, D, WIDTH, N)
        scores = scores_of(q_block, k_block, scale, PRECISION, CAP, True) + added
        probs = probs_of(
            scores, load_lse(lse_rows, first, rows, M)[:, None],
            first, at, more, left, right, columns, M, N, LEFT, RIGHT, False,
        )  # fmt: skip
        dout_block = read(dout_rows, dout_strides, first, rows, D, WIDTH, M, True)
        v_block = _load_between(v_rows, v_strides, at, columns, D, WIDTH, N)
        dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
        row_delta = load_row(delta_rows, first, rows, M)[:, None]
        dscores = dscores_of(scores, probs, dprobs, row_delta, CAP)
        seen = visible_pairs(first, at, more, left, right, columns, M, N, LEFT, RIGHT)
        seen &= tl.arange(0, N)[None, :] >= -at
        sums += tl.where(seen & (tl.arange(0, M)[:, None] < rows), dscores, 0.0)
    between = tl.arange(0, N)[None, :] - tl.arange(0, M)[:, None]
    add_by_distance(bias, head, sums, apart + ahead + between)


@triton.jit
def _load_between(
    at, strides, first, count, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """Load SIZE tokens, `first` after `at`: (SIZE, WIDTH), 0 before `at` and after `count`."""
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    there = (token >= -first) & (token < count)
    places = at + wide(first) * strides[1] + token * strides[1] + column
    return tl.load(places, mask=there & (column < D), other=0.0)
