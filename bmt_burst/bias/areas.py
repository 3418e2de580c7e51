"""The areas of scores: parts of the visible pairs in which all pairs have one row of a table.

Nearly all pairs of a long sequence lie in large areas. The other pairs have rows by distance, or
follow no such rule.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..sequence.mask import Mask, Slice
from ..sequence.span import Span, length, merged, overlap

BY_DISTANCE = -1  # instead of a row: the distance gives it
_LONG = 256  # tokens of a segment that is worth separate kernel calls
_MOST_TERMS = 16  # of one row: attention keeps a number for each of them, query and head


class Term(NamedTuple):
    """The visible pairs of `mask`, a part of all visible pairs.

    row  the row of the table that all of them have; BY_DISTANCE if the distance gives the row of
         each; None if rows follow no such rule
    """

    row: int | None
    mask: Mask


def is_one_row(row: int | None) -> bool:
    """Check whether all pairs of a term have the same row of the table."""
    return row is not None and row != BY_DISTANCE


class _Segment(NamedTuple):
    """The integers of `Scores` that all tokens of a segment have."""

    group: int
    base: int
    segment: int


class _LabelledSpan(NamedTuple):
    """A range of tokens. `of` is their long segment or group, if any."""

    span: Span
    of: _Segment | int | None


@dataclass(frozen=True, eq=False)
class Areas:
    """The fields of `Scores` that its areas follow from, and its runs of equal tokens: (5, runs)
    int64, start, stop, group, base and segment of each.
    """

    mask: Mask
    runs: Tensor
    pairs: Tensor
    distances: Tensor
    other: int

    def terms(self) -> tuple[Term, ...]:
        """Return the visible pairs in parts. The part without a row, if any, is the first."""
        segments = self.long_segments
        if len(segments) == len(self.long_groups) == 1 and segments[0].of is None:
            return (Term(None, self.mask),)  # at once, for many short documents
        areas: dict[int | None, list[Slice]] = {}
        for s in self.mask.slices:
            for row, area in self._cut_by_groups(s):
                areas.setdefault(row, []).append(area)
        sizes = {row: sum(s.area for s in areas[row]) for row in areas if is_one_row(row)}
        for row in sorted(sizes, key=lambda row: (sizes[row], row))[:-_MOST_TERMS]:
            areas.setdefault(None, []).extend(areas.pop(row))
        order = sorted(areas, key=lambda row: -2 if row is None else row)
        masks = (Mask(self.mask.seq_len, tuple(_join_slices(areas[row]))) for row in order)
        return tuple(map(Term, order, masks))

    @functools.cached_property
    def long_segments(self) -> list[_LabelledSpan]:
        """The sequence in long runs of a segment, and the ranges between them."""
        runs = self.runs[:, self.runs[1] - self.runs[0] >= _LONG].T.tolist()
        spans = [_LabelledSpan((start, stop), _Segment(*of)) for start, stop, *of in runs]
        return self._with_gaps(spans)

    @functools.cached_property
    def long_groups(self) -> list[_LabelledSpan]:
        """The sequence in long runs of a group, and the ranges between them."""
        found = []
        for group, runs in itertools.groupby(self.runs.T.tolist(), key=lambda run: run[2]):
            spans = [run[:2] for run in runs]
            if (stop := spans[-1][1]) - (start := spans[0][0]) >= _LONG:
                found.append(_LabelledSpan((start, stop), group))
        return self._with_gaps(found)

    def _with_gaps(self, spans: Sequence[_LabelledSpan]) -> list[_LabelledSpan]:
        found, at = [], 0
        for each in (*spans, _LabelledSpan((self.mask.seq_len, self.mask.seq_len), None)):
            start, stop = each.span
            found += [_LabelledSpan((at, start), None)] * (at < start) + [each] * (start < stop)
            at = stop
        return found

    def _cut_by_groups(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        """Yield the parts of a visible slice, each with its row or None."""
        for part, mine, theirs in _parts(s, self.long_groups):
            if mine is not None and theirs is not None and mine != theirs:
                yield self.other, part
            else:
                yield from self._cut_by_segments(part)

    def _cut_by_segments(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        for part, mine, theirs in _parts(s, self.long_segments):
            if mine is None or theirs is None:
                yield None, part
            elif mine.group != theirs.group:
                yield self.other, part
            elif (row := int(self.pairs[mine.base + theirs.segment])) == BY_DISTANCE:
                yield from self._bands(part)
            else:
                yield row, part

    def _bands(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        """Yield the parts of a slice in one segment: near pairs, and far pairs on either side."""
        low, high = -math.inf if s.low is None else s.low, math.inf if s.high is None else s.high
        reach = len(self.distances) // 2  # from there on all pairs have the same row
        edges = (1 - reach, reach) if reach else ()
        for start, stop in itertools.pairwise([low, *(x for x in edges if low < x < high), high]):
            # distances are of keys from queries, bounds of queries from keys
            far = int(self.distances[-1 if stop <= 1 - reach else 0])
            near = 1 - reach <= start < reach
            lowest, highest = (None if math.isinf(x) else int(x) for x in (start, stop))
            part = Slice(s.q, s.kv, lowest, highest)
            if part.area:
                yield (BY_DISTANCE if near else far), part


def _parts(s: Slice, spans: Sequence[_LabelledSpan]) -> Iterator[tuple[Slice, Any, Any]]:
    """Yield the parts of a slice that spans cut, with the labels of their queries and keys."""
    for (q, mine), (kv, theirs) in itertools.product(_within(s.q, spans), _within(s.kv, spans)):
        part = s._replace(q=q, kv=kv)
        if part.area:
            yield part, mine, theirs


def _within(span: Span, spans: Sequence[_LabelledSpan]) -> Iterator[_LabelledSpan]:
    """Yield the spans of a range. A short part of a long run counts as lying between runs."""
    first = bisect.bisect_right(spans, span[0], key=lambda each: each.span[1])
    for one, of in itertools.islice(spans, first, None):
        part = overlap(one, span)
        if not length(part):
            return
        yield _LabelledSpan(part, of if length(part) >= _LONG else None)


def _join_slices(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the same pairs in fewer slices: neighbours that differ only in their keys, or only in
    their queries, are joined.
    """
    turned = map(_turn, _join_keys(slices))
    return map(_turn, _join_keys(turned))


def _join_keys(slices: Iterable[Slice]) -> Iterator[Slice]:
    spans: dict[tuple[Span, int | None, int | None], list[Span]] = {}
    for q, kv, low, high in slices:
        spans.setdefault((q, low, high), []).append(kv)
    for (q, low, high), of_keys in spans.items():
        yield from (Slice(q, kv, low, high) for kv in merged(of_keys))


def _turn(s: Slice) -> Slice:
    """Exchange queries and keys. The band stays, since it is only compared."""
    return s._replace(q=s.kv, kv=s.q)
