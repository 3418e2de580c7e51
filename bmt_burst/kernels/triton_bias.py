"""What the Triton kernels of `triton_blocks.py` add to scores, and how the gradient of a bias's
table adds up.

Rows of the table are found by distance alone, or by segments: see `CallBias`. Sums are of whole
numbers of 64 bits, the same in any order. Letters are those of `triton_blocks.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

# What BIAS says of a call's biases. Pairs that go by distance alone are many; the others are few.
NONE = tl.constexpr(0)
BY_DISTANCE = tl.constexpr(1)
BY_SEGMENTS = tl.constexpr(2)

# of a table: to sum a block's pairs of each is faster than to add each pair
_FEW_ROWS = tl.constexpr(48)


class BiasArguments(NamedTuple):
    """A `CallBias` as the kernels take it; `()` where there is none.

    distances    (2 reach + 1,) int32: rows, from reach on alike
    biases       (H, R + 2 reach + 1) fp32, to base 2: the table, and behind it its rows of
                 `distances`
    sums         (H, R) int64: what the gradient adds up, 1 / unit each
    unit         (H,) fp32
    others       None where all goes by distance
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


class Distances(NamedTuple):
    """The positions of a sequence's queries and keys.

    q_position, kv_position  where those of its first tokens are
    apart                    of its first key from its first query
    even                     whether neighbours are one apart on both sides
    """

    q_position: tl.tensor
    q_count: tl.tensor
    kv_position: tl.tensor
    kv_count: tl.tensor
    apart: tl.tensor
    even: tl.tensor


@triton.jit
def distances_of(bias, q_start, q_count, kv_start, kv_count):
    """Positions rise in a sequence: they are even if the last one is."""
    queries, keys = bias.q_position + q_start, bias.kv_position + kv_start
    query, key = (
        tl.load(queries, mask=q_count > 0, other=0),
        tl.load(keys, mask=kv_count > 0, other=0),
    )
    last_query = tl.load(queries + q_count - 1, mask=q_count > 0, other=0)
    last_key = tl.load(keys + kv_count - 1, mask=kv_count > 0, other=0)
    even = (last_query - query == q_count - 1) & (last_key - key == kv_count - 1)
    return Distances(queries, q_count, keys, kv_count, key - query, even)


@triton.jit
def _positions(positions, first, count, SIZE: tl.constexpr):
    """(SIZE,): those of tokens first .. of a sequence of `count`, and 0."""
    token = first + tl.arange(0, SIZE)
    return tl.load(positions + token, mask=(token >= 0) & (token < count), other=0)


@triton.jit
def _spread(queries, keys, TRANSPOSED: tl.constexpr):
    """Numbers of queries and of keys as a column and a row, or the other way round."""
    return tl.expand_dims(queries, 0 if TRANSPOSED else 1), tl.expand_dims(
        keys, 1 if TRANSPOSED else 0
    )


@triton.jit
def by_distance(
    bias, head, places, first, at, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """(M, N), or (N, M) if TRANSPOSED: what is added to the scores of queries first .. and keys at
    .., to base 2.
    """
    # Places in the table are made positive before the pointer is added: to add less than 0 went
    # wrong (Triton 3.6).
    biases, middle = bias.biases + head * (bias.rows + 2 * bias.reach + 1), bias.rows + bias.reach
    if places.even:
        # A block that is beyond reach may as well be nearer, as long as all of it is beyond that.
        distance = tl.minimum(tl.maximum(places.apart + at - first, M - bias.reach), bias.reach - N)
        query, key = _spread(tl.arange(0, M), tl.arange(0, N), TRANSPOSED)
        result = tl.load(biases + (middle + distance + key - query))
    else:
        distances = uneven(places, first, at, M, N, TRANSPOSED)
        result = tl.load(biases + (middle + _clamp(distances, bias.reach)))
    return result


@triton.jit
def uneven(places, first, at, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(M, N), or (N, M) if TRANSPOSED: distances, whatever the positions."""
    queries = _positions(places.q_position, first, places.q_count, M)
    keys = _positions(places.kv_position, at, places.kv_count, N)
    query, key = _spread(queries, keys, TRANSPOSED)
    return key - query


class Fields(NamedTuple):
    """What a bias says of the tokens first .. first + count - 1 of one side, SIZE of them or fewer.

    groups, segments, positions  (SIZE,); segments are bases on the queries' side
    group, segment               of the first token
    alike                        whether all tokens have these
    """

    groups: tl.tensor
    segments: tl.tensor
    positions: tl.tensor
    group: tl.tensor
    segment: tl.tensor
    alike: tl.tensor
    first: tl.tensor
    count: tl.tensor


@triton.jit
def _fields(groups, segments, positions, first, count, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    group, segment = tl.load(groups + first), tl.load(segments + first)
    all_groups = tl.load(groups + first + token, mask=token < count, other=group)
    all_segments = tl.load(segments + first + token, mask=token < count, other=segment)
    all_positions = tl.load(positions + first + token, mask=token < count, other=0)
    differ = tl.max(((all_groups != group) | (all_segments != segment)).to(tl.int32), 0)
    return Fields(
        all_groups, all_segments, all_positions, group, segment, differ == 0, first, count
    )


@triton.jit
def q_fields(bias, first, count, M: tl.constexpr):
    return _fields(bias.q_group, bias.q_base, bias.q_position, first, count, M)


@triton.jit
def kv_fields(bias, first, count, N: tl.constexpr):
    return _fields(bias.kv_group, bias.kv_segment, bias.kv_position, first, count, N)


@triton.jit
def by_segments(bias, head, queries, keys, TRANSPOSED: tl.constexpr):
    """(M, N), or (N, M) if TRANSPOSED: what is added to the scores, to base 2."""
    biases = bias.biases + head * (bias.rows + 2 * bias.reach + 1)
    q_positions, kv_positions = _spread(queries.positions, keys.positions, TRANSPOSED)
    near = bias.rows + bias.reach + _clamp(kv_positions - q_positions, bias.reach)
    if queries.alike & keys.alike:
        row = tl.load(
            bias.pairs + queries.segment + keys.segment,
            mask=queries.group == keys.group,
            other=bias.other,
        )
        result = tl.load(biases + tl.where(row < 0, near, row))
    else:
        rows = _pair_rows(bias, queries, keys, TRANSPOSED)
        result = tl.load(biases + tl.where(rows < 0, near, rows))
    return result


@triton.jit
def _pair_rows(bias, queries, keys, TRANSPOSED: tl.constexpr):
    """The rows of the table, negative where they go by distance."""
    q_groups, kv_groups = _spread(queries.groups, keys.groups, TRANSPOSED)
    bases, segments = _spread(queries.segments, keys.segments, TRANSPOSED)
    return tl.load(bias.pairs + (bases + segments), mask=q_groups == kv_groups, other=bias.other)


@triton.jit
def _clamp(distance, reach):
    return tl.minimum(tl.maximum(distance, -reach), reach)


@triton.jit
def add_by_distance(bias, head, dscores, distances):
    """Adds dscores (M, N) to the sums of their rows, as integers: their sum is the same in any
    order.
    """
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
    """Adds those of dscores (M, N) that go by distance, where keys are of one segment; the sums of
    the others (M,).
    """
    rows = _rows_with(bias, queries, keys.group, keys.segment, queries.groups == keys.group)
    near = _there(queries, M) & (rows < 0)
    if tl.max(near.to(tl.int32), 0) > 0:
        distances = keys.positions[None, :] - queries.positions[:, None]
        add_by_distance(bias, head, tl.where(near[:, None], dscores, 0.0), distances)
    return tl.sum(tl.where(near[:, None], 0.0, dscores), 1)


@triton.jit
def add_waiting(bias, head, waiting, queries, group, segment, M: tl.constexpr):
    """Adds what queries have with keys of one segment (M,) to the sums of their rows."""
    some = _there(queries, M) & (waiting != 0.0)
    rows = _rows_with(bias, queries, group, segment, some & (queries.groups == group))
    unit = tl.load(bias.unit + head)
    tl.atomic_add(
        bias.sums + head * bias.rows + rows, _whole(waiting, unit), mask=some, sem="relaxed"
    )


@triton.jit
def _there(fields, SIZE: tl.constexpr):
    """(SIZE,): which of a block's tokens there are. Beside keys of inf, gradients of the others'
    scores are NaN.
    """
    return tl.arange(0, SIZE) < fields.count


@triton.jit
def _rows_with(bias, queries, group, segment, same):
    """The rows (M,) of queries with keys of a segment, that of other groups' where they are not of
    the same.
    """
    return tl.load(bias.pairs + (queries.segments + segment), mask=same, other=bias.other)


@triton.jit
def add_by_segments(bias, head, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Adds dscores (M, N) to the sums of their rows where these go by segments."""
    rows = _pair_rows(bias, queries, keys, False)
    near = tl.where(_there(queries, M)[:, None] & (rows < 0), dscores, 0.0)
    if tl.max(tl.max((near != 0.0).to(tl.int32), 1), 0) > 0:
        add_by_distance(bias, head, near, keys.positions[None, :] - queries.positions[:, None])
    if tl.max(tl.max(rows, 1), 0) >= 0:
        sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
        _add_by_runs(sums, unit, bias, tl.where(rows < 0, 0.0, dscores), queries, keys, M, N)


@triton.jit
def _add_by_runs(sums, unit, bias, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """What does not go by distance, with zeros elsewhere. Queries of one run have the same row with
    a key: they are summed before they are added.
    """
    token = tl.arange(0, M)
    start = 0
    while start < queries.count:
        group = tl.load(bias.q_group + queries.first + start)
        base = tl.load(bias.q_base + queries.first + start)
        others = (token >= start) & ((queries.groups != group) | (queries.segments != base))
        stop = tl.min(tl.where(others, token, queries.count), 0)
        total = tl.sum(tl.where(((token >= start) & (token < stop))[:, None], dscores, 0.0), 0)
        row = tl.load(
            bias.pairs + (base + keys.segments), mask=keys.groups == group, other=bias.other
        )
        tl.atomic_add(sums + row, _whole(total, unit), mask=row >= 0, sem="relaxed")
        start = stop


@triton.jit
def _whole(x, unit):
    """The nearest number of units."""
    return tl.floor(x * unit + 0.5).to(tl.int64)
