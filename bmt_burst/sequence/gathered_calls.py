"""Kernel calls: tiles grouped into as few calls as possible, and the tokens that each call gathers.

The tiles of a call share neither queries nor keys, and have one kind of band. Tokens that are far
apart are copied together for a call. Short gaps between tiles are included instead.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .span import Span, length, merged, shifted
from .tile import KernelCall, Tile, TileFields

# The most tokens between two tiles that a kernel call includes, instead of copying tiles together.
_GAP = 256
# A rectangle with at most this many queries is joined with others that see the same keys, and one
# with at most this many keys with others that are seen by the same queries.
_NARROW = 256
# Spans that are copied together for one kernel call. More are taken with the gaps between them.
_MOST_SPANS = 8

_Band = tuple[int | None, int | None]  # left and right of a kernel call


class GatheredCall(NamedTuple):
    """A kernel call on the queries of q_spans and the keys of kv_spans. `label` says which pairs it
    has, to the code that computes the call.
    """

    q_spans: tuple[Span, ...]
    kv_spans: tuple[Span, ...]
    call: KernelCall
    label: Any = None


def by_columns(tiles: Sequence[TileFields]) -> list[TileFields]:
    """Return tiles of the same pairs, in which rectangles share as few keys as possible."""
    rectangles = sorted((Tile(*t) for t in tiles if t[2:] == (None, None)), key=lambda t: t.kv)
    if len(rectangles) < 2:
        return list(tiles)
    joined: dict[tuple[Span, int], Tile] = {}  # by queries and where the keys end
    active: list[Tile] = []
    coming = iter([*rectangles, None])
    following = next(coming)
    for columns in itertools.pairwise(sorted({edge for t in rectangles for edge in t.kv})):
        active = [t for t in active if t.kv[1] > columns[0]]
        while following and following.kv[0] <= columns[0]:
            active.append(following)
            following = next(coming)
        for rows in merged(t.q for t in active):
            before = joined.pop((rows, columns[0]), Tile(rows, columns))
            joined[rows, columns[1]] = Tile(rows, (before.kv[0], columns[1]))
    return [*(t for t in tiles if t[2:] != (None, None)), *joined.values()]


def kernel_calls(
    tiles: Iterable[TileFields], label: Hashable | None = None, most_gaps: float = 0.0
) -> list[GatheredCall]:
    """Group tiles into few kernel calls with a `label`.

    most_gaps  a call includes all gaps between its tiles if they have at most this share of the
               tiles' tokens. Otherwise it includes only short ones.
    """
    kinds: dict[_Band, list[tuple[Span, Span]]] = {}
    for tile in tiles:
        for q, kv, left, right in _align(tile):
            kinds.setdefault((left, right), []).append((q, kv))
    _join_kinds(kinds)
    calls = []
    for band, entries in kinds.items():
        is_full = band == (None, None)
        sides = _join_narrow(entries) if is_full else [((q,), (kv,)) for q, kv in sorted(entries)]
        for group in _group_disjoint(sides):
            rows, q_places = _gather_spans([q for q, _ in group], most_gaps)
            columns, kv_places = _gather_spans([kv for _, kv in group], most_gaps)
            places = tuple(zip(q_places, kv_places, strict=True))
            sizes = sum(map(length, rows)), sum(map(length, columns))
            calls.append(GatheredCall(rows, columns, KernelCall(*sizes, places, *band), label))
    return calls


def _align(tile: TileFields) -> Iterator[tuple[Span, Span, int | None, int | None]]:
    """Yield a tile as (q, kv, left, right): a band counted from the last query and the last key.
    The last queries of a causal tile, if they see all keys, are a rectangle of their own.
    """
    (a, b), kv, low, high = tile
    rows, columns = b - a, length(kv)
    if low is not None and high is None and (corner := columns + low) < rows:
        yield (a, a + corner), kv, None, 0
        yield (a + corner, b), kv, None, None
        return
    beyond = rows - columns
    left = None if high is None else high - 1 - beyond
    yield (a, b), kv, left, None if low is None else beyond - low


def _join_kinds(kinds: dict[_Band, list[tuple[Span, Span]]]) -> None:
    """Move tiles to a kind with a tighter band, if that hides nothing of them: fewer calls."""
    full: _Band = (None, None)
    causal: _Band = (None, 0)
    moves = [(full, causal, 0, 1)]  # source, target, and the most queries (0) or keys (1) of a tile
    moves += [
        (causal, (left, right), 1, left + 1)
        for left, right in kinds
        if left is not None and right == 0
    ]
    for source, target, side, most in moves:
        if source in kinds and target in kinds:
            kinds[target] += [entry for entry in kinds[source] if length(entry[side]) <= most]
            kinds[source] = [entry for entry in kinds[source] if length(entry[side]) > most]


# A tile's queries and keys. Each may be several rising spans, which are copied together.
_Sides = tuple[tuple[Span, ...], tuple[Span, ...]]


def _join_narrow(rectangles: Sequence[tuple[Span, Span]]) -> list[_Sides]:
    """Join narrow rectangles that have the same keys, and then those that have the same queries."""
    by_keys: dict[Span, list[Span]] = {}
    found: list[_Sides] = []
    for q, kv in sorted(rectangles):
        if length(q) <= _NARROW:
            by_keys.setdefault(kv, []).append(q)
    by_queries: dict[Span, list[Span]] = {}
    for q, kv in sorted(rectangles):
        if len(by_keys.get(kv, ())) > 1 and length(q) <= _NARROW:
            continue
        if length(kv) <= _NARROW:
            by_queries.setdefault(q, []).append(kv)
        else:
            found.append(((q,), (kv,)))
    found += [(tuple(queries), (kv,)) for kv, queries in by_keys.items() if len(queries) > 1]
    found += [((q,), tuple(keys)) for q, keys in by_queries.items()]
    return sorted(found)


def _group_disjoint(tiles: Iterable[_Sides]) -> list[list[_Sides]]:
    """Group tiles so that queries and keys rise without overlap in each group."""
    groups: list[list[_Sides]] = []
    for q, kv in tiles:
        for group in groups:
            q_before, kv_before = group[-1]
            if q_before[-1][1] <= q[0][0] and kv_before[-1][1] <= kv[0][0]:
                group.append((q, kv))
                break
        else:
            groups.append([(q, kv)])
    return groups


def _gather_spans(
    sides: Sequence[tuple[Span, ...]], most_gaps: float
) -> tuple[tuple[Span, ...], list[Span]]:
    """Return spans that hold one side of rising tiles, and where each tile lies in them, once they
    lie one after the other. See `kernel_calls` for the gaps between tiles that they include.
    """
    if any(len(side) > 1 for side in sides):  # without gaps
        spans = [span for side in sides for span in side]
        ends = itertools.accumulate((sum(map(length, side)) for side in sides), initial=0)
        return tuple(spans), list(itertools.pairwise(ends))
    spans = [side[0] for side in sides]
    near = merged(spans, _GAP)
    whole = near[0][0], near[-1][1]
    tokens = sum(map(length, near))
    if len(near) > _MOST_SPANS or length(whole) <= (1 + most_gaps) * tokens:
        near = (whole,)
    places, index, before = [], 0, 0
    for span in spans:
        while span[0] >= near[index][1]:
            before += length(near[index])
            index += 1
        places.append(shifted(span, before - near[index][0]))
    return near, places
