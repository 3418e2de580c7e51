"""A tiling: a mask cut by layouts, as tiles of queries and keys that ranks have.

`seen` finds which tokens of which ranks a rank's queries attend to. `tiles` finds how they attend
to tokens that lie somewhere in memory. The work grows with what a rank needs, not with the mask. To
find which queries attend to a rank's keys, take the tiling of the transposed mask.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .joining import join_neighbours
from .layout import Layout, Run, RunFields
from .mask import Mask, Slice
from .span import Span, length, merged, shifted
from .tile import Tile, TileFields, flipped


class _QueryRun(NamedTuple):
    """The queries of a run that are in a slice: tokens `span`, from position `first` on."""

    slice: Slice
    first: int
    step: int
    span: Span

    @property
    def visible(self) -> Span:
        last = self.first + self.step * (length(self.span) - 1)
        return self.slice.seen_from(self.first, last)


class _Sorted:
    """Ranges in the order of their starts, for finding those that overlap a range."""

    def __init__(self, spans: Sequence[Span]):
        self.starts = [start for start, _ in spans]
        self.reach = list(itertools.accumulate((stop for _, stop in spans), max))

    def around(self, start: int, stop: int) -> range:
        """Return indices of a few ranges, which include all that overlap start..stop."""
        return range(bisect.bisect_right(self.reach, start), bisect.bisect_left(self.starts, stop))


class Tiling:
    """`mask` cut by a layout of its queries and one of its keys.

    kv_layout  by default `layout`: queries and keys are the same tokens. With two layouts, tokens
               of equal visibility are joined, so positions may differ from those of the layouts
               that were passed. Spans of shards do not.
    """

    def __init__(self, mask: Mask, layout: Layout, kv_layout: Layout | None = None):
        if kv_layout is not None:
            layout = join_neighbours(layout, mask.transposed)
            kv_layout = join_neighbours(kv_layout, mask)
        self.mask, self.layout, self.kv_layout = mask, layout, kv_layout or layout
        self.is_one_layout = kv_layout is None
        self._slices = _Sorted([s.q for s in mask.slices])
        self._parts_of: dict[int, list[_QueryRun]] = {}

    @functools.cached_property
    def transposed(self) -> Tiling:
        other = Tiling(self.mask.transposed, self.kv_layout)
        other.kv_layout, other.is_one_layout = self.layout, self.is_one_layout
        if self.is_one_layout:
            other._owners = self._owners
        return other

    def with_mask(self, mask: Mask) -> Tiling:
        """Return the tiling of another mask by the same layout. Both share the layout's runs."""
        assert self.is_one_layout, "positions of two layouts are those for one mask"
        other = Tiling(mask, self.layout)
        other._owners = self._owners
        return other

    def seen(self, rank: int) -> list[RunFields]:
        """Return the keys of other ranks that queries of `rank` attend to, in order of position.

        Each is part of one run of a shard. With steps, it may include unneeded tokens.
        """
        spans = merged(self._visible_spans(rank))
        return [run for span in spans for run in self.runs_at(span) if run[2] != rank]

    def runs_at(self, positions: Span) -> list[RunFields]:
        """Return the keys of all ranks at some positions: parts of runs, in order of position.

        Each document of a striped layout has ranks x ranks of these, so this is one plain loop.
        """
        start, stop = positions
        runs, order = self._owners
        near = order.around(start, stop)
        found: list[RunFields] = []
        for position, step, owner, (offset, end) in runs[near.start : near.stop]:
            # as in _inside
            first, last = -((position - start) // step), -((position - stop) // step)
            first = first if first > 0 else 0
            last = last if last < end - offset else end - offset
            if first < last:
                span = offset + first, offset + last
                found.append((position + step * first, step, owner, span))
        found.sort()
        return found

    def seen_by(self, rank: int, inner: int) -> dict[int, tuple[Span, ...]]:
        """Return the keys of `rank`'s shard that other ranks need, as rising spans of it, by the
        viewer's host of `inner` ranks.
        """
        viewers, order = self.transposed._owners
        found: dict[int, set[Span]] = {}
        for s, position, step, (at, end) in self.transposed._parts(rank):
            near = order.around(*s.seen_from(position, position + step * (end - at - 1)))
            for viewer in viewers[near.start : near.stop]:
                part = _part(Slice(*flipped(s)), viewer) if viewer.owner != rank else None
                if part and length(seen := _inside(position, step, end - at, *part.visible)):
                    found.setdefault(viewer.owner // inner, set()).add(shifted(seen, at))
        return {host: merged(spans) for host, spans in found.items()}

    @functools.cached_property
    def pairs(self) -> list[float]:
        """The number of pairs that each rank's queries see. Every n-th query counts as 1/n of all.

        One sweep over all runs, since ranks count the pairs of all ranks.
        """
        assert self.is_one_layout, "the runs are those of keys"
        counts, at, before = [0.0] * self.layout.size, 0, 0
        for start, step, rank, span in self._owners[0]:
            stop = start + step * (length(span) - 1) + 1
            if start != at:
                before = self._count_before(start)
            after = self._count_before(stop)
            counts[rank] += (after - before) * length(span) / (stop - start)
            at, before = stop, after
        return counts

    def own_tiles(self, rank: int) -> list[TileFields]:
        """Return how queries of `rank` attend to its own keys, in tokens of its shards."""
        runs = self.kv_layout.runs(rank)
        tiles: list[TileFields] = []
        for s, of_slice in itertools.groupby(self._parts(rank), lambda part: part.slice):
            parts = list(of_slice)
            # Positions rise within a shard, so a causal slice is one triangle of the shard.
            if self.is_one_layout and s.q == s.kv and s.low == 0 and s.high is None:
                span = parts[0].span[0], parts[-1].span[1]
                tiles.append(Tile(span, span, 0 if length(span) > 1 else None))
            else:
                tiles += _tiles(parts, runs, [run.span for run in runs])
        return tiles

    def tiles(
        self, rank: int, runs: Sequence[RunFields], places: Sequence[Span]
    ) -> list[TileFields]:
        """Return how queries of `rank` attend to rising runs that lie at `places` in memory."""
        return _tiles(self._parts(rank), runs, places)

    def _visible_spans(self, rank: int) -> Iterator[Span]:
        """Yield what queries of `rank` see in a slice, without runs that see only themselves."""
        for positions in self.layout.shards[rank]:
            start, stop, step = positions.start, positions.stop, positions.step
            near = self._slices.around(start, stop)
            for s in self.mask.slices[near.start : near.stop]:
                if self.is_one_layout and step == 1 and start <= s.kv[0] and s.kv[1] <= stop:
                    continue  # as with a whole document
                first, last = _inside(start, step, len(positions), *s.q)
                if first < last:
                    yield s.seen_from(start + step * first, start + step * (last - 1))

    def _count_before(self, position: int) -> int:
        """Count the pairs that queries before a position see."""
        near = self._slices.around(position, position)
        count = self._areas[near.start]
        for (start, stop), kv, low, high in self.mask.slices[near.start : near.stop]:
            count += Slice((start, min(stop, position)), kv, low, high).area
        return count

    @functools.cached_property
    def _areas(self) -> list[int]:
        """The pairs of all slices before each one, and of all."""
        return [*itertools.accumulate((s.area for s in self.mask.slices), initial=0)]

    def _parts(self, rank: int) -> list[_QueryRun]:
        """Return the queries of a rank, by slice."""
        if rank not in self._parts_of:
            found = []
            for run in self.layout.runs(rank):
                for index in self._slices.around(run.start, run.stop):
                    if part := _part(self.mask.slices[index], run):
                        found.append((index, part))
            found.sort(key=operator.itemgetter(0))
            self._parts_of[rank] = [part for _, part in found]
        return self._parts_of[rank]

    @functools.cached_property
    def _owners(self) -> tuple[list[Run], _Sorted]:
        """The runs of keys of all ranks in the order of their starts, and their positions."""
        layout = self.kv_layout
        runs = sorted(run for rank in range(layout.size) for run in layout.runs(rank))
        return runs, _Sorted([(run.start, run.stop) for run in runs])


def _part(s: Slice, run: Run) -> _QueryRun | None:
    """Return the queries of a run that are in a slice, if there are any."""
    start, step, _, (offset, end) = run
    first, stop = _inside(start, step, end - offset, *s.q)
    if first >= stop:
        return None
    return _QueryRun(s, start + step * first, step, (offset + first, offset + stop))


def _inside(position: int, step: int, tokens: int, start: int, stop: int) -> Span:
    """Return which of `tokens` tokens at `position`, position + step, ... lie in start..stop - 1.

    If none do, the span's stop is not after its start.
    """
    first, last = -((position - start) // step), -((position - stop) // step)
    return first if first > 0 else 0, last if last < tokens else tokens


def _tiles(
    parts: Iterable[_QueryRun], runs: Sequence[RunFields], places: Sequence[Span]
) -> list[TileFields]:
    positions = [(start, start + step * (stop - at)) for start, step, _, (at, stop) in runs]
    order = _Sorted(positions)
    tiles: list[TileFields] = []
    for part in parts:
        (start, stop), step = part.visible, part.step
        for index in order.around(start, stop) if start < stop else ():
            if runs[index][1] != step:
                for rectangle in _cut_staircase(part, runs[index], places[index]):
                    _append(tiles, rectangle)
            elif tile := _tile(part, runs[index], places[index]):
                _append(tiles, tile)
    return tiles


def _cut_staircase(part: _QueryRun, run: RunFields, place: Span) -> Iterator[TileFields]:
    """Yield rectangles with all that a part's queries see of a run with another step, where a band
    is a staircase. Rectangles of one depth at one edge of it share neither queries nor keys, so
    they may be one kernel call.
    """
    s, first, step, (q_start, q_stop) = part
    position, its_step, _, _ = run

    def find_keys(row: int) -> Span:
        """Return the places of the keys that a query sees."""
        start, stop = (
            place[0] + min(max(-((position - edge) // its_step), 0), length(place))
            for edge in s.seen_from(first + step * row, first + step * row)
        )
        return start, stop

    def cut(rows: Span, keys: Span) -> Iterator[TileFields]:
        """Yield rectangles of the visible pairs of some queries with some keys."""
        of_first, of_last = find_keys(rows[0]), find_keys(rows[1] - 1)
        if max(keys[0], of_first[0]) >= min(keys[1], of_last[1]):
            return
        begin = min(max(keys[0], of_last[0]), keys[1])
        end = max(begin, min(keys[1], of_first[1]))
        if begin < end:
            yield (q_start + rows[0], q_start + rows[1]), (begin, end), None, None
        if length(rows) > 1:
            middle = (rows[0] + rows[1]) // 2
            for half in ((rows[0], middle), (middle, rows[1])):
                yield from cut(half, (keys[0], begin))
                yield from cut(half, (end, keys[1]))

    yield from cut((0, q_stop - q_start), place)


def _tile(part: _QueryRun, run: RunFields, place: Span) -> TileFields | None:
    """Return the smallest tile with all that a part's queries see of a run that lies at `place`, or
    None if they see nothing.

    For positions i = i0 + step a and j = j0 + step b, the band low <= i - j < high is a band of
    a - b. This is the innermost loop of planning, so it is one function.
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
    """Add a tile. If it is a rectangle next to the last one, join the two."""
    if tiles and tile[2:] == tiles[-1][2:] == (None, None):
        (q, kv, _, _), (next_q, next_kv, _, _) = tiles[-1], tile
        if q == next_q and kv[1] == next_kv[0]:
            tiles[-1] = q, (kv[0], next_kv[1]), None, None
            return
        if kv == next_kv and q[1] == next_q[0]:
            tiles[-1] = (q[0], next_q[1]), kv, None, None
            return
    tiles.append(tile)
