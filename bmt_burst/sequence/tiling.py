"""A tiling: a mask cut by a layout, as tiles of queries and keys that ranks have.

`seen` finds which tokens of which ranks a rank's queries look at. `tiles` finds how they look at
tokens that lie somewhere in memory. `kernel_calls` groups tiles into kernel calls. The work grows
with what the asked ranks look at, not with the whole mask. To find which queries look at a rank's
keys, take the tiling of the transposed mask.

Numbers are plain, except that `seen_table` returns columns of them as a tensor on the CPU.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Layout
from .mask import Mask, Slice
from .span import Span, length, merged, shifted
from .tile import KernelCall, Tile

# The most tokens between two tiles that a kernel call includes, instead of copying tiles together.
_GAP = 256
# A call with a bias includes all gaps if they have at most this share of the tiles' tokens. Copying
# tiles takes longer than writing zeros for gaps. With gaps in all calls, attention of CPM-Bee at
# 64K tokens took 118.6 ms instead of 123.5 for forward and backward, on one H200. Without a bias
# there was no gain.
_MOST_BIASED_GAPS = 0.75
# A rectangle with at most this many queries is joined with others that see the same keys, and one
# with at most this many keys with others that are seen by the same queries.
_NARROW = 256
# Spans that are copied together for one kernel call. More are taken with the gaps between them.
_MOST_SPANS = 8


class ShardRun(NamedTuple):
    """Tokens `span` of the shard of `owner`. The first has position `start`, the next `start +
    step`, and so on.
    """

    start: int
    step: int
    owner: int
    span: Span

    @property
    def stop(self) -> int:
        return self.start + self.step * length(self.span)


# A run and a tile as plain tuples. Functions accept either. Striped layouts have very many of
# them, and the garbage collector scans named tuples again and again, but plain ones only once or
# twice.
RunFields = tuple[int, int, int, Span]
TileFields = tuple[Span, Span, int | None, int | None]


_Band = tuple[int | None, int | None]  # left and right of a kernel call


class _QueryRun(NamedTuple):
    """The queries of a run that are in a slice: tokens `span`, from position `first` on."""

    slice: Slice
    first: int
    step: int
    span: Span

    @property
    def visible(self) -> Span:
        """The positions that any of the queries sees."""
        return _visible(self.slice, self.first, self.first + self.step * (length(self.span) - 1))


class _Sorted:
    """Ranges in the order of their starts, for finding those that overlap a range."""

    def __init__(self, spans: Sequence[Span]):
        self.starts = [start for start, _ in spans]
        self.reach = list(itertools.accumulate((stop for _, stop in spans), max))

    @functools.cached_property
    def _columns(self) -> tuple[Tensor, Tensor]:
        return column(self.starts), column(self.reach)

    def around(self, start: int, stop: int) -> range:
        """Return indices of a few ranges, which include all that overlap start..stop."""
        return range(bisect.bisect_right(self.reach, start), bisect.bisect_left(self.starts, stop))

    def pairs_around(self, start: Tensor, stop: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `around` does for many ranges, as two columns: pairs (which range, index)."""
        starts, reach = self._columns
        first = torch.searchsorted(reach, start, right=True)
        count = (torch.searchsorted(starts, stop) - first).clamp_(min=0)
        asked = torch.repeat_interleave(count)
        shift = first - (count.cumsum(0) - count)
        return asked, torch.arange(len(asked), device="cpu") + shift[asked]


class _Owners:
    """The runs of all ranks in the order of their starts."""

    def __init__(self, runs: Iterable[ShardRun]):
        self.runs = sorted(runs)
        self.order = _Sorted([(run.start, run.stop) for run in self.runs])

    @functools.cached_property
    def table(self) -> Tensor:
        """(runs, 5) int64: start, step, owner, and the span's first and stop."""
        fields = [(start, step, owner, *span) for start, step, owner, span in self.runs]
        return column(list(itertools.chain(*fields))).view(-1, 5)


class Tiling:
    """`mask` cut by `layout`, both of one length."""

    def __init__(self, mask: Mask, layout: Layout):
        self.mask, self.layout = mask, layout
        self._slices = _Sorted([s.q for s in mask.slices])
        self._reach: dict[int, tuple[Span, ...]] = {}
        self._parts_of: dict[int, list[_QueryRun]] = {}

    @functools.cached_property
    def transposed(self) -> Tiling:
        """The tiling of the transposed mask."""
        return self.with_mask(self.mask.transposed)

    def with_mask(self, mask: Mask) -> Tiling:
        """Return the tiling of another mask by the same layout. Both share the layout's runs."""
        other = Tiling(mask, self.layout)
        other._owners = self._owners
        return other

    def seen(self, rank: int) -> list[ShardRun]:
        """Return the tokens of other ranks that queries of `rank` look at, in order of position.

        Each is part of one run of a shard. With steps, it may include tokens that no query looks
        at.
        """
        runs, order = self._owners.runs, self._owners.order
        found: list[ShardRun] = []
        for start, stop in self.looks_at(rank):
            near = order.around(start, stop)
            for run in runs[near.start : near.stop]:
                span = _within(run, start, stop)
                if length(span) and run.owner != rank:
                    first, step, owner, (offset, _) = run
                    found.append(ShardRun(first + step * (span[0] - offset), step, owner, span))
        return sorted(found)

    def seen_table(self, ranks: Sequence[int]) -> Tensor:
        """Return `seen` of several ranks as one table, (runs, 6) int64, in no order.

        Its columns are viewer, start, step, owner, and where the span starts and stops. For
        thousands of runs this is far quicker than `seen`, for a few it is slower.
        """
        spans = [self.looks_at(rank) for rank in ranks]
        viewer = column([rank for rank, found in zip(ranks, spans, strict=True) for _ in found])
        start = column([start for found in spans for start, _ in found])
        stop = column([stop for found in spans for _, stop in found])
        asked, index = self._owners.order.pairs_around(start, stop)
        viewer, start, stop = viewer[asked], start[asked], stop[asked]
        position, step, owner, offset, end = self._owners.table[index].unbind(1)
        first = (-((position - start) // step)).clamp_(min=0)  # as `_inside` does
        last = torch.minimum(-((position - stop) // step), end - offset)
        columns = viewer, position + step * first, step, owner, offset + first, offset + last
        return torch.stack(columns, 1)[(first < last) & (owner != viewer)]

    def shard(self, rank: int) -> list[ShardRun]:
        """Return all tokens of a rank's shard, in the order of their positions.

        `tiles` takes them for a whole block.
        """
        return sorted(self._runs(rank))

    def seen_by(self, rank: int, inner: int) -> dict[int, tuple[Span, ...]]:
        """Return the tokens of `rank`'s shard that other ranks look at, as rising spans of it.

        They are sorted by the host of the viewer, if a host has `inner` ranks.
        """
        runs, order = self._owners.runs, self._owners.order
        found: dict[int, set[Span]] = {}
        for own in self._runs(rank):
            for index in self._keys.around(own.start, own.stop):
                s = self._slices_by_key[index]
                first = s.q[0] if s.low is None else max(s.q[0], own.start + s.low)
                last = s.q[1] if s.high is None else min(s.q[1], own.stop - 1 + s.high)
                for near in order.around(first, last):
                    viewer = runs[near]
                    part = _part(s, viewer) if viewer.owner != rank else None
                    if part and length(span := _within(own, *part.visible)):
                        found.setdefault(viewer.owner // inner, set()).add(span)
        return {host: merged(spans) for host, spans in found.items()}

    def own_tiles(self, rank: int) -> list[TileFields]:
        """Return how queries of `rank` look at its own keys, in tokens of its shard."""
        runs = list(self._runs(rank))
        tiles: list[TileFields] = []
        for s, of_slice in itertools.groupby(self._parts(rank), lambda part: part.slice):
            parts = list(of_slice)
            # Positions rise within a shard, so a causal slice is one triangle of the shard.
            if s.q == s.kv and s.low == 0 and s.high is None:
                span = parts[0].span[0], parts[-1].span[1]
                tiles.append(Tile(span, span, 0 if length(span) > 1 else None))
            else:
                tiles += _tiles(parts, runs, [run.span for run in runs])
        return tiles

    def tiles(
        self, rank: int, runs: Sequence[RunFields], places: Sequence[Span]
    ) -> list[TileFields]:
        """Return how queries of `rank` look at runs that lie at `places` in memory.

        Pieces are in the order of their positions.
        """
        return _tiles(self._parts(rank), runs, places)

    def looks_at(self, rank: int) -> tuple[Span, ...]:
        """Return the positions that queries of `rank` see, in rising spans with gaps between them.

        Runs that see only themselves, as whole documents do, are left out.
        """
        if rank in self._reach:
            return self._reach[rank]
        spans: list[Span] = []
        for positions in self.layout.shards[rank]:
            start, stop, step = positions.start, positions.stop, positions.step
            tokens = len(positions)
            near = self._slices.around(start, stop)
            for s in self.mask.slices[near.start : near.stop]:
                q, kv, _, _ = s
                if step == 1 and start <= kv[0] and kv[1] <= stop:
                    continue  # as with a whole document
                first, last = _inside(start, step, tokens, *q)
                if first < last:
                    spans.append(_visible(s, start + step * first, start + step * (last - 1)))
        self._reach[rank] = merged(spans)
        return self._reach[rank]

    def _parts(self, rank: int) -> list[_QueryRun]:
        """Return the queries of a rank, by slice."""
        if rank not in self._parts_of:
            found = []
            for run in self._runs(rank):
                for index in self._slices.around(run.start, run.stop):
                    if part := _part(self.mask.slices[index], run):
                        found.append((index, part))
            found.sort(key=operator.itemgetter(0))
            self._parts_of[rank] = [part for _, part in found]
        return self._parts_of[rank]

    def _runs(self, rank: int) -> Iterator[ShardRun]:
        offset = 0
        for positions in self.layout.shards[rank]:
            yield ShardRun(
                positions.start, positions.step, rank, (offset, offset := offset + len(positions))
            )

    @functools.cached_property
    def _owners(self) -> _Owners:
        return _Owners(run for rank in range(self.layout.size) for run in self._runs(rank))

    @functools.cached_property
    def _slices_by_key(self) -> Sequence[Slice]:
        return sorted(self.mask.slices, key=lambda s: s.kv)

    @functools.cached_property
    def _keys(self) -> _Sorted:
        return _Sorted([s.kv for s in self._slices_by_key])


def _part(s: Slice, run: ShardRun) -> _QueryRun | None:
    """Return the queries of a run that are in a slice, if there are any."""
    start, step, _, (offset, end) = run
    first, stop = _inside(start, step, end - offset, *s.q)
    return (
        _QueryRun(s, start + step * first, step, (offset + first, offset + stop))
        if first < stop
        else None
    )


def _visible(s: Slice, first: int, last: int) -> Span:
    """Return the positions that any query from `first` to `last` sees of a slice."""
    _, (start, stop), low, high = s
    if high is not None:
        start = max(start, first - high + 1)
    if low is not None:
        stop = min(stop, last - low + 1)
    return start, stop


def _within(run: ShardRun, start: int, stop: int) -> Span:
    """Return the span of a run with positions start..stop - 1. It may be empty."""
    position, step, _, (offset, end) = run
    first, last = _inside(position, step, end - offset, start, stop)
    return offset + first, offset + last


def _inside(position: int, step: int, tokens: int, start: int, stop: int) -> Span:
    """Return which of `tokens` tokens at `position`, position + step, ... lie in start..stop - 1.

    If none do, the span's stop is not after its start.
    """
    first, last = -((position - start) // step), -((position - stop) // step)
    return first if first > 0 else 0, last if last < tokens else tokens


def column(numbers: Sequence[int]) -> Tensor:
    """Return numbers as (numbers,) int64 on the CPU, whatever the default device is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _tiles(
    parts: Iterable[_QueryRun], runs: Sequence[RunFields], places: Sequence[Span]
) -> list[TileFields]:
    positions = [(start, start + step * (stop - at)) for start, step, _, (at, stop) in runs]
    order = _Sorted(positions)
    side_by_side = any(step > 1 for _, step, _, _ in runs)
    tiles: list[TileFields] = []
    for part in parts:
        start, stop = part.visible
        nearby = order.around(start, stop) if start < stop else range(0)
        whole = range(0) if side_by_side else _seen_by_all(part, positions, nearby)
        for index in nearby:
            tile = (
                (part.span, places[index], None, None)
                if index in whole
                else _tile(part, runs[index], places[index])
            )
            if tile:
                _append(tiles, tile)
    return tiles


def _seen_by_all(part: _QueryRun, positions: Sequence[Span], nearby: range) -> range:
    """Return which of the `nearby` runs every query of the part sees whole.

    The runs have no steps, so these are neighbours.
    """
    # what the last query sees at least, and the first at most
    start, stop = _visible(part.slice, part.first + part.step * (length(part.span) - 1), part.first)
    first, end = nearby.start, nearby.stop
    while first < end and positions[first][0] < start:
        first += 1
    while first < end and positions[end - 1][1] > stop:
        end -= 1
    return range(first, end)


def _tile(part: _QueryRun, run: RunFields, place: Span) -> TileFields | None:
    """Return the smallest tile with all that a part's queries see of a run that lies at `place`.

    Return None if they see nothing. For positions i = i0 + step a and j = j0 + step b, the band
    low <= i - j < high is a band of a - b. Bounds of the tile that hide nothing are None. This is
    the innermost loop of planning, so it is one function.
    """
    (_, (kv_start, kv_stop), low, high), first_position, step, (q_start, q_stop) = part
    position, its_step, _, _ = run
    kv_place, kv_end = place
    # Keep the tokens of the run that are in the slice.
    begin, end = -((position - kv_start) // its_step), -((position - kv_stop) // its_step)
    if begin > 0:
        kv_place, position = kv_place + begin, position + its_step * begin
    else:
        begin = 0
    columns, rows = min(end, kv_end - place[0]) - begin, q_stop - q_start
    if columns <= 0:
        return None
    assert its_step == step, (
        f"expected one step for all ranges of a layout, got {step} and {its_step}"
    )
    ahead = first_position - position
    below = -columns if low is None else -((ahead - low) // step)
    above = rows + 1 if high is None else -((ahead - high) // step)
    # Drop rows that see nothing and columns that nobody sees.
    first, last = max(0, below), min(rows, columns + above - 1)
    left, right = max(0, first - above + 1), min(columns, last - below)
    if below >= above or first >= last or left >= right:
        return None
    below, above = below - first + left, above - first + left
    return (
        (q_start + first, q_start + last),
        (kv_place + left, kv_place + right),
        None if below <= 1 - (right - left) else below,
        None if above >= last - first else above,
    )


def _append(tiles: list[TileFields], tile: TileFields) -> None:
    """Add a tile. If it is a rectangle beside the last one, join the two."""
    if tiles and tile[2:] == tiles[-1][2:] == (None, None):
        (q, kv, _, _), (next_q, next_kv, _, _) = tiles[-1], tile
        if q == next_q and kv[1] == next_kv[0]:
            tiles[-1] = q, (kv[0], next_kv[1]), None, None
            return
        if kv == next_kv and q[1] == next_q[0]:
            tiles[-1] = (q[0], next_q[1]), kv, None, None
            return
    tiles.append(tile)


class GatheredCall(NamedTuple):
    """A kernel call and its tokens: the queries at spans `rows` and the keys at spans `columns`.

    row    the row of the `Term` that the call is part of. None without a bias, and where kernels
           cannot compute the bias from distances.
    apart  how far the first key of each tile is ahead of its first query. It is given only for
           biases by distance, and only if neighbours in a tile are neighbours in the sequence.
    """

    q_spans: tuple[Span, ...]
    kv_spans: tuple[Span, ...]
    call: KernelCall
    row: int | None = None
    apart: tuple[int, ...] | None = None


def flipped(tile: TileFields) -> TileFields:
    """Exchange queries and keys."""
    q, kv, low, high = tile
    return kv, q, None if high is None else 1 - high, None if low is None else 1 - low


def by_columns(tiles: Sequence[TileFields]) -> list[TileFields]:
    """Return tiles of the same pairs, in which queries that see the same keys are joined.

    Their rectangles share as few keys as possible.
    """
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


def kernel_calls(tiles: Iterable[TileFields], row: int | None = None) -> list[GatheredCall]:
    """Group tiles into few kernel calls. The tiles of a call share neither queries nor keys."""
    kinds: dict[_Band, list[tuple[Span, Span]]] = {}
    for tile in tiles:
        for q, kv, left, right in _aligned(tile):
            kinds.setdefault((left, right), []).append((q, kv))
    _join(kinds)
    return [
        _gather_call(group, *kind, row)
        for kind, entries in kinds.items()
        for group in _disjoint(
            _without_narrow(entries) if kind == (None, None) else map(_alone, sorted(entries))
        )
    ]


def _aligned(tile: TileFields) -> Iterator[tuple[Span, Span, int | None, int | None]]:
    """Return a tile as (q, kv, left, right): a band counted from the last query and the last key.

    If the last queries of a causal tile see all keys, return two: those queries are a rectangle.
    """
    (a, b), kv, low, high = tile
    rows, columns = b - a, length(kv)
    if low is not None and high is None and (corner := columns + low) < rows:
        yield (a, a + corner), kv, None, 0
        yield (a + corner, b), kv, None, None
        return
    beyond = rows - columns
    yield (
        (a, b),
        kv,
        None if high is None else high - 1 - beyond,
        None if low is None else beyond - low,
    )


def _join(kinds: dict[_Band, list[tuple[Span, Span]]]) -> None:
    """Move tiles to a kind with a tighter band, if that hides nothing of them.

    They become one call with the tiles of that kind.
    """

    def move(source: _Band, target: _Band, fits: Callable[[Span, Span], bool]) -> None:
        if source in kinds and target in kinds:
            kinds[target] += [entry for entry in kinds[source] if fits(*entry)]
            kinds[source] = [entry for entry in kinds[source] if not fits(*entry)]

    def has_keys(most: int) -> Callable[[Span, Span], bool]:
        return lambda _, kv: length(kv) <= most

    move((None, None), (None, 0), lambda q, _: length(q) == 1)
    for left, right in list(kinds):
        if left is not None and right == 0:
            move((None, 0), (left, 0), has_keys(left + 1))


# A tile, as its queries and its keys. Each may be several rising spans, which become one when they
# are copied one after the other.
_Sides = tuple[tuple[Span, ...], tuple[Span, ...]]


def _alone(entry: tuple[Span, Span]) -> _Sides:
    q, kv = entry
    return (q,), (kv,)


def _without_narrow(rectangles: Sequence[tuple[Span, Span]]) -> list[_Sides]:
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
            found.append(_alone((q, kv)))
    found += [(tuple(queries), (kv,)) for kv, queries in by_keys.items() if len(queries) > 1]
    found += [((q,), tuple(keys)) for q, keys in by_queries.items()]
    return sorted(found)


def _disjoint(tiles: Iterable[_Sides]) -> list[list[_Sides]]:
    """Group tiles so that queries and keys rise without overlap in each group.

    Each tile joins the first group whose last tile it may follow.
    """
    groups: list[list[_Sides]] = []
    ends: list[Span] = []  # where the queries and the keys of each group stop
    for tile in tiles:
        q, kv = tile
        end = q[-1][1], kv[-1][1]
        for index, (q_end, kv_end) in enumerate(ends):
            if q_end <= q[0][0] and kv_end <= kv[0][0]:
                groups[index].append(tile)
                ends[index] = end
                break
        else:
            groups.append([tile])
            ends.append(end)
    return groups


def _gather_call(
    tiles: Sequence[_Sides], left: int | None, right: int | None, row: int | None
) -> GatheredCall:
    most_gaps = 0.0 if row is None else _MOST_BIASED_GAPS
    rows, q_places = _gathered([q for q, _ in tiles], most_gaps)
    columns, kv_places = _gathered([kv for _, kv in tiles], most_gaps)
    tokens, kv_tokens = (sum(map(length, spans)) for spans in (rows, columns))
    places = tuple(zip(q_places, kv_places, strict=True))
    return GatheredCall(rows, columns, KernelCall(tokens, kv_tokens, places, left, right), row)


def _gathered(
    sides: Sequence[tuple[Span, ...]], most_gaps: float
) -> tuple[tuple[Span, ...], list[Span]]:
    """Return spans that hold one side of rising tiles, and where each tile lies in them.

    The spans lie one after the other. They may include gaps between tiles: short ones, and all if
    they have at most the share `most_gaps` of the other tokens.
    """
    if any(len(side) > 1 for side in sides):  # without gaps
        spans = [span for side in sides for span in side]
        ends = itertools.accumulate((sum(map(length, side)) for side in sides), initial=0)
        return tuple(spans), list(itertools.pairwise(ends))
    spans = [side[0] for side in sides]
    near: list[Span] = []
    for span in spans:
        if near and span[0] - near[-1][1] <= _GAP:
            near[-1] = near[-1][0], span[1]
        else:
            near.append(span)
    whole = near[0][0], near[-1][1]
    tokens = sum(map(length, near))
    if len(near) > _MOST_SPANS or length(whole) <= (1 + most_gaps) * tokens:
        near = [whole]
    places, index, before = [], 0, 0
    for span in spans:
        while span[0] >= near[index][1]:
            before += length(near[index])
            index += 1
        places.append(shifted(span, before - near[index][0]))
    return tuple(near), places
