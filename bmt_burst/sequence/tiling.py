"""What ranks see of each other: a mask cut by a layout, in tiles.

`seen` says which tokens of which ranks a rank's queries look at, `tiles` how they look at tokens
that lie somewhere in memory, `kernel_calls` in which kernel calls tiles are computed. All is local
to the ranks that are asked about. For the other way round, which queries look at a rank's keys,
take the tiling of the transposed mask. Plain numbers.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .layout import Layout
from .mask import Mask, Slice
from .span import Span, length, merged, shifted
from .tile import KernelCall, Tile

_GAP = 256  # tokens between two tiles that one kernel call may as well go over
# tokens of queries, or keys, that are worth being joined with others that see, or are seen by, the
# same
_NARROW = 256
# that are copied together for one kernel call; more are taken with the gaps between them
_MOST_SPANS = 8


class Piece(NamedTuple):
    """Tokens `span` of the shard of `owner`; the first has position `start`, the next ones are
    `step` apart.
    """

    start: int
    step: int
    owner: int
    span: Span

    @property
    def stop(self) -> int:
        return self.start + self.step * length(self.span)


# A piece as a plain tuple (start, step, owner, span). Striped layouts have very many of them, and
# named tuples are scanned by every run of the garbage collector, while plain tuples of numbers are
# not.
Fields = tuple[int, int, int, Span]


class _Part(NamedTuple):
    """The queries of a run that are in a slice: local tokens `span`, from position `first` on."""

    slice: Slice
    first: int
    step: int
    span: Span

    @property
    def visible(self) -> Span:
        """Positions that any of the queries sees."""
        return _visible(self.slice, self.first, self.first + self.step * (length(self.span) - 1))


class _Sorted:
    """Ranges in the order of their starts, to be found by what they overlap."""

    def __init__(self, spans: Sequence[Span]):
        self.starts = [start for start, _ in spans]
        self.reach = list(itertools.accumulate((stop for _, stop in spans), max))

    def around(self, start: int, stop: int) -> range:
        """Indices of a few ranges, among them all that overlap start..stop."""
        return range(bisect.bisect_right(self.reach, start), bisect.bisect_left(self.starts, stop))


class Tiling:
    """`mask` cut by `layout`, both of one length."""

    def __init__(self, mask: Mask, layout: Layout):
        self.mask, self.layout = mask, layout
        self._slices = _Sorted([s.q for s in mask.slices])
        self._reach: dict[int, tuple[Span, ...]] = {}
        self._parts_of: dict[int, list[_Part]] = {}

    @functools.cached_property
    def transposed(self) -> Tiling:
        """The tiling of the transposed mask."""
        return self.of(self.mask.transposed)

    def of(self, mask: Mask) -> Tiling:
        """The tiling of another mask by the same layout; what is known of that is shared."""
        other = Tiling(mask, self.layout)
        other._owners = self._owners
        return other

    def seen(self, rank: int) -> list[Piece]:
        """The tokens of other ranks that queries of `rank` look at, in the order of their
        positions.

        Every piece is part of one run; of runs with steps there may be tokens among them that
        nobody looks at.
        """
        return [Piece(*fields) for fields in self.seen_fields(rank)]

    def seen_fields(self, rank: int) -> list[Fields]:
        """Return the fields of the pieces that `rank` sees, in the same order."""
        runs, order, side_by_side = self._owners
        found: list[Fields] = []
        for start, stop in self._looks_at(rank):
            near = order.around(start, stop)
            if side_by_side or len(near) < 3:
                found += filter(None, [_within(runs[index], start, stop) for index in near])
            else:  # between the first and the last whole runs
                found += filter(None, (_within(runs[near[0]], start, stop),))
                found += runs[near[1] : near[-1]]
                found += filter(None, (_within(runs[near[-1]], start, stop),))
        return sorted([fields for fields in found if fields[2] != rank])

    def shard(self, rank: int) -> list[Piece]:
        """Return all tokens of a rank's shard, in the order of their positions: what `tiles` takes
        of a whole block.
        """
        return sorted(self._runs(rank))

    def seen_by(self, rank: int, inner: int) -> dict[int, tuple[Span, ...]]:
        """The tokens of `rank`'s shard that other ranks look at, by host of `inner` ranks: spans of
        it, rising.
        """
        runs, order, _ = self._owners
        found: dict[int, set[Span]] = {}
        for own in self._runs(rank):
            for index in self._keys.around(own.start, own.stop):
                s = self._slices_by_key[index]
                first = s.q[0] if s.low is None else max(s.q[0], own.start + s.low)
                last = s.q[1] if s.high is None else min(s.q[1], own.stop - 1 + s.high)
                for near in order.around(first, last):
                    viewer = runs[near]
                    part = _part(s, viewer) if viewer.owner != rank else None
                    if part and (fields := _within(own, *part.visible)):
                        found.setdefault(viewer.owner // inner, set()).add(fields[3])
        return {host: merged(spans) for host, spans in found.items()}

    def own_tiles(self, rank: int) -> list[Tile]:
        """How queries of `rank` look at its own keys, in tokens of its shard."""
        runs = list(self._runs(rank))
        tiles: list[Tile] = []
        for s, parts in itertools.groupby(self._parts(rank), lambda part: part.slice):
            parts = list(parts)
            # positions rise: one triangle, whatever is between them
            if s.q == s.kv and s.low == 0 and s.high is None:
                span = parts[0].span[0], parts[-1].span[1]
                tiles.append(Tile(span, span, 0 if length(span) > 1 else None))
            else:
                tiles += _tiles(parts, runs, [run.span for run in runs])
        return tiles

    def tiles(self, rank: int, pieces: Sequence[Fields], places: Sequence[Span]) -> list[Tile]:
        """How queries of `rank` look at keys that lie in memory: pieces in the order of positions,
        at `places`.
        """
        return _tiles(self._parts(rank), pieces, places)

    def _looks_at(self, rank: int) -> tuple[Span, ...]:
        """Positions that queries of `rank` see, but for those that a run sees of nothing but
        itself.
        """
        found = self._reach.get(rank)
        if found is None:
            spans = []
            for positions in self.layout.shards[rank]:
                start, stop, step, tokens = (
                    positions.start,
                    positions.stop,
                    positions.step,
                    len(positions),
                )
                for index in self._slices.around(start, stop):
                    s = self.mask.slices[index]
                    if step == 1 and start <= s.kv[0] and s.kv[1] <= stop:
                        continue  # as with a whole document
                    first, last = _inside(start, step, tokens, *s.q)
                    if first < last:
                        spans.append(_visible(s, start + step * first, start + step * (last - 1)))
            found = self._reach[rank] = merged(spans)
        return found

    def _parts(self, rank: int) -> list[_Part]:
        """The queries of a rank, by slice."""
        if rank not in self._parts_of:
            found = []
            for run in self._runs(rank):
                for index in self._slices.around(run.start, run.stop):
                    if part := _part(self.mask.slices[index], run):
                        found.append((index, part))
            found.sort(key=_first)
            self._parts_of[rank] = [part for _, part in found]
        return self._parts_of[rank]

    def _runs(self, rank: int) -> Iterator[Piece]:
        offset = 0
        for positions in self.layout.shards[rank]:
            yield Piece(
                positions.start, positions.step, rank, (offset, offset := offset + len(positions))
            )

    @functools.cached_property
    def _owners(self) -> tuple[list[Piece], _Sorted, bool]:
        """The runs of all ranks in the order of their starts, and whether any lie side by side."""
        runs = sorted(run for rank in range(self.layout.size) for run in self._runs(rank))
        order = _Sorted(
            [(start, start + step * (stop - first)) for start, step, _, (first, stop) in runs]
        )
        return runs, order, any(step > 1 for _, step, _, _ in runs)

    @functools.cached_property
    def _slices_by_key(self) -> Sequence[Slice]:
        return sorted(self.mask.slices, key=lambda s: s.kv)

    @functools.cached_property
    def _keys(self) -> _Sorted:
        return _Sorted([s.kv for s in self._slices_by_key])


def _first(entry: tuple) -> int:
    return entry[0]


def _part(s: Slice, run: Piece) -> _Part | None:
    """The queries of a run in a slice."""
    start, step, _, (offset, end) = run
    first, stop = _inside(start, step, end - offset, *s.q)
    return (
        _Part(s, start + step * first, step, (offset + first, offset + stop))
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


def _within(run: Piece, start: int, stop: int) -> Fields | None:
    """The part of a run with positions start..stop - 1."""
    position, step, owner, (offset, end) = run
    first, last = _inside(position, step, end - offset, start, stop)
    return (
        (position + step * first, step, owner, (offset + first, offset + last))
        if first < last
        else None
    )


def _inside(position: int, step: int, tokens: int, start: int, stop: int) -> Span:
    """Which of `tokens` tokens at `position`, position + step, ... lie in start..stop - 1.

    The span stops before it starts, or where it does, if none of them do.
    """
    first, last = -((position - start) // step), -((position - stop) // step)
    return first if first > 0 else 0, last if last < tokens else tokens


def _tiles(parts: Iterable[_Part], pieces: Sequence[Fields], places: Sequence[Span]) -> list[Tile]:
    positions = [(start, start + step * length(span)) for start, step, _, span in pieces]
    order = _Sorted(positions)
    side_by_side = any(step > 1 for _, step, _, _ in pieces)
    tiles: list[Tile] = []
    for part in parts:
        start, stop = part.visible
        nearby = order.around(start, stop) if start < stop else range(0)
        whole = range(0) if side_by_side else _seen_by_all(part, positions, nearby)
        for index in nearby:
            tile = (
                Tile(part.span, places[index])
                if index in whole
                else _tile(part, pieces[index], places[index])
            )
            if tile:
                _append(tiles, tile)
    return tiles


def _seen_by_all(part: _Part, positions: Sequence[Span], nearby: range) -> range:
    """Those of the `nearby` pieces without steps, next to each other, that every query of the part
    sees whole.
    """
    # for all of them
    start, stop = _visible(part.slice, part.first + part.step * (length(part.span) - 1), part.first)
    first, end = nearby.start, nearby.stop
    while first < end and positions[first][0] < start:
        first += 1
    while first < end and positions[end - 1][1] > stop:
        end -= 1
    return range(first, end)


def _tile(part: _Part, piece: Fields, place: Span) -> Tile | None:
    """How a part's queries see a piece whose tokens lie at `place`; None if they see nothing of it.

    Of positions i = i0 + step a and j = j0 + step b, low <= i - j < high is a band of a - b.
    """
    (_, kv, low, high), first, step, q = part
    position, its_step, _, _ = piece
    left, right = _inside(position, its_step, length(place), *kv)
    if left >= right:
        return None
    assert its_step == step, (
        f"a run of step {step} sees one of step {its_step}: a layout's ranges have one step"
    )
    ahead = first - position - step * left
    low = left - right if low is None else -((ahead - low) // step)
    high = length(q) + 1 if high is None else -((ahead - high) // step)
    return _tight(q, (place[0] + left, place[0] + right), low, high)


def _tight(q: Span, kv: Span, low: int, high: int) -> Tile | None:
    """The smallest tile with what is visible of one, without bounds that hide nothing."""
    rows, columns = length(q), length(kv)
    if low >= high:
        return None
    first, last = max(0, low), min(rows, columns + high - 1)
    if first >= last:
        return None
    left, right = max(0, first - high + 1), min(columns, last - low)
    if left >= right:
        return None
    low, high = low - first + left, high - first + left
    rows, columns = last - first, right - left
    return Tile(
        (q[0] + first, q[0] + last),
        (kv[0] + left, kv[0] + right),
        None if low <= 1 - columns else low,
        None if high >= rows else high,
    )


def _append(tiles: list[Tile], tile: Tile) -> None:
    """Adds a tile, as a part of the last one if both are rectangles side by side."""
    if tiles and tile[2:] == tiles[-1][2:] == (None, None):
        q, kv, _, _ = tiles[-1]
        if q == tile.q and kv[1] == tile.kv[0]:
            tiles[-1] = Tile(q, (kv[0], tile.kv[1]))
            return
        if kv == tile.kv and q[1] == tile.q[0]:
            tiles[-1] = Tile((q[0], tile.q[1]), kv)
            return
    tiles.append(tile)


class Cut(NamedTuple):
    """A kernel call and what it is about: queries and keys at these spans, one after the other.

    row   of the `Term` that it is part of; None too where there is no bias, and where kernels
          cannot go by distance
    apart of each tile, how far its first key is ahead of its first query, if queries that lie side
          by side in tiles are neighbours in the sequence, and keys too; said where it matters, of
          what goes by distance
    """

    rows: tuple[Span, ...]
    columns: tuple[Span, ...]
    call: KernelCall
    row: int | None = None
    apart: tuple[int, ...] | None = None


def flipped(tile: Tile) -> Tile:
    """Queries in the place of keys."""
    return Tile(tile.kv, tile.q, *(None if x is None else 1 - x for x in (tile.high, tile.low)))


def by_columns(tiles: Sequence[Tile]) -> list[Tile]:
    """The same pairs, with rectangles that share no keys where they can: queries that see the same
    keys are joined.
    """
    rectangles = sorted((t for t in tiles if t[2:] == (None, None)), key=lambda t: t.kv)
    if len(rectangles) < 2:
        return list(tiles)
    joined: dict[tuple[Span, int], Tile] = {}  # by queries and where the keys end
    active: list[Tile] = []
    coming = iter([*rectangles, None])
    following = next(coming)
    for columns in itertools.pairwise(sorted({cut for t in rectangles for cut in t.kv})):
        active = [t for t in active if t.kv[1] > columns[0]]
        while following and following.kv[0] <= columns[0]:
            active.append(following)
            following = next(coming)
        for rows in merged(t.q for t in active):
            before = joined.pop((rows, columns[0]), Tile(rows, columns))
            joined[rows, columns[1]] = Tile(rows, (before.kv[0], columns[1]))
    return [*(t for t in tiles if t[2:] != (None, None)), *joined.values()]


def kernel_calls(tiles: Iterable[Tile], row: int | None = None) -> list[Cut]:
    """As few kernel calls as compute the tiles, each of tiles that share neither queries nor keys."""
    kinds: dict[tuple[int | None, int | None], list[tuple[Span, Span]]] = {}
    for tile in tiles:
        for q, kv, left, right in _aligned(tile):
            kinds.setdefault((left, right), []).append((q, kv))
    _join(kinds)
    return [
        _cut(group, *kind, row)
        for kind, entries in kinds.items()
        for group in _disjoint(
            _without_narrow(entries) if kind == (None, None) else map(_alone, sorted(entries))
        )
    ]


def _aligned(tile: Tile) -> Iterator[tuple[Span, Span, int | None, int | None]]:
    """A tile, or the parts of one, as (q, kv, left, right): bands counted from the last query and
    the last key.

    A causal tile in which the last queries see all keys is one that they do not, and a rectangle
    below it.
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


def _join(kinds: dict[tuple[int | None, int | None], list[tuple[Span, Span]]]) -> None:
    """Puts tiles that a window or a triangle does not cut among those of one that does, to be one
    call with them.
    """

    def move(source: tuple, target: tuple, fits: Callable[[Span, Span], bool]) -> None:
        if source in kinds and target in kinds:
            kinds[target] += [entry for entry in kinds[source] if fits(*entry)]
            kinds[source] = [entry for entry in kinds[source] if not fits(*entry)]

    move((None, None), (None, 0), lambda q, kv: length(q) == 1)
    for left, right in list(kinds):
        if left is not None and right == 0:
            move((None, 0), (left, 0), lambda q, kv, left=left: length(kv) <= left + 1)


# A tile of which each side may be several rising spans, q and kv: it is one where these lie one
# after the other.
_Sides = tuple[tuple[Span, ...], tuple[Span, ...]]


def _alone(entry: tuple[Span, Span]) -> _Sides:
    q, kv = entry
    return (q,), (kv,)


def _without_narrow(rectangles: Sequence[tuple[Span, Span]]) -> list[_Sides]:
    """Rectangles, of which narrow ones with the same keys are one, and then those with the same
    queries.
    """
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
    """Groups in which both sides rise without overlap; each tile is in the first that it may
    follow.
    """
    groups: list[list[_Sides]] = []
    ends: list[Span] = []  # of each group: where its queries and its keys stop
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


def _cut(tiles: Sequence[_Sides], left: int | None, right: int | None, row: int | None) -> Cut:
    rows, q_places = _gathered([q for q, _ in tiles])
    columns, kv_places = _gathered([kv for _, kv in tiles])
    tokens, kv_tokens = (sum(map(length, spans)) for spans in (rows, columns))
    places = tuple(zip(q_places, kv_places, strict=True))
    return Cut(rows, columns, KernelCall(tokens, kv_tokens, places, left, right), row)


def _gathered(sides: Sequence[tuple[Span, ...]]) -> tuple[tuple[Span, ...], list[Span]]:
    """Spans that hold one side of rising tiles, and where the tiles lie when those lie one after
    the other.
    """
    if any(len(side) > 1 for side in sides):  # just these
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
    if len(near) > _MOST_SPANS:
        near = [(near[0][0], near[-1][1])]
    places, index, before = [], 0, 0
    for span in spans:
        while span[0] >= near[index][1]:
            before += length(near[index])
            index += 1
        places.append(shifted(span, before - near[index][0]))
    return tuple(near), places
