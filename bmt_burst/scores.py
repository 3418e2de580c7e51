"""Scores: what is added to scale q k^T, where it is a learned number for each head that a few
integers of both tokens choose. CPM-Live's models have such a bias, and masks that go with it; T5's
relative positions are another.

A token has a group, a segment of it, and a position; groups and segments are runs of the sequence.
Pairs of one segment have a number by their distance, alike from `reach` on; pairs of two segments
of one group one by these; pairs of two groups one for all. So nearly all pairs of a long sequence
lie in large areas with one number each. Attention with a constant added is plain attention with
that added to its lse, which the fastest kernels do: `terms` are those areas. What is left is for a
kernel that knows the table: near pairs of a long segment, which go by distance alone, and pairs of
segments that are short, but for those of two groups that are long.

No rank, no layout, no GPU. All of it is O(sequence), and the same on every rank.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base.arguments import as_int
from .sequence.mask import Mask, Slice
from .sequence.span import Span, length, overlap

BY_DISTANCE = -1  # in place of a row: it follows from the distance
_LONG = 256  # tokens from which on a segment is worth kernel calls of its own
_MOST_TERMS = 16  # with a row each: attention keeps a number for each of them, query and head


class Term(NamedTuple):
    """A part of the visible pairs: those of `mask`.

    All have row `row` of the table; BY_DISTANCE: each has its own by its distance; None: each has
    its own.
    """

    row: int | None
    mask: Mask


def is_one_row(row: int | None) -> bool:
    """Whether all pairs of a term have the same row of the table."""
    return row is not None and row != BY_DISTANCE


class _Segment(NamedTuple):
    """What `Scores` say of its tokens."""

    group: int
    base: int
    segment: int


class _LabelledSpan(NamedTuple):
    """A range of tokens: of one segment, or of one group, if it is long; or any."""

    span: Span
    of: _Segment | int | None


class _Integers:
    """A field (N,) int32 of Scores. It is copied when it is set and when it is read, so that nobody
    can change it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, scores: Scores | None, owner: type) -> Tensor:
        if scores is None:
            # as dataclasses ask the class for one
            raise AttributeError(f"{self.name} has no default")
        return getattr(scores, f"_{self.name}").clone()

    def __set__(self, scores: Scores, x: Tensor) -> None:
        _check_integers(self.name, x)
        object.__setattr__(scores, f"_{self.name}", x.clone(memory_format=torch.contiguous_format))


@dataclass(frozen=True, eq=False)
class Scores:
    """The visible pairs of a sequence, and the row of a table (rows, H) that each adds to its
    scores.

    Query i and key j have the row
        other                                     if group[i] != group[j], else
        pairs[base[i] + segment[j]]               if that is not BY_DISTANCE (-1), else
        distances[clamp(j - i, -reach, reach) + reach]

    mask                  which pairs are visible
    group, base, segment  (seq_len,) int32, on the CPU; `base` says where a query's segment begins
    in `pairs`
    pairs                 (P,) int32: rows, or BY_DISTANCE
    distances             (2 reach + 1,) int32: rows
    other                 a row

    Tensors are copied when they are given and when they are read, so that nothing can change the
    Scores. Raises ValueError or TypeError for tensors of another kind or length, or numbers that
    lead out of them.
    """

    mask: Mask
    group: Tensor = _Integers()
    base: Tensor = _Integers()
    segment: Tensor = _Integers()
    pairs: Tensor = _Integers()
    distances: Tensor = _Integers()
    other: int

    def __post_init__(self):
        if not isinstance(self.mask, Mask):
            raise TypeError(f"scores need a Mask, got {type(self.mask).__name__}")
        for name in ("group", "base", "segment"):
            if (tokens := len(getattr(self, name))) != self.seq_len:
                raise ValueError(f"{name} has {tokens} numbers for a mask of {self.seq_len} tokens")
        object.__setattr__(self, "other", as_int("other", self.other))
        if len(self._distances) % 2 == 0:
            raise ValueError(
                f"distances are 2 reach + 1 rows, an odd number; got {len(self._distances)}"
            )
        self._check_rows()
        self._check_entries()

    @staticmethod
    def by_distance(mask: Mask, distances: Tensor) -> Scores:
        """Rows by distance alone, as T5 has them."""
        nothing = torch.zeros(mask.seq_len, dtype=torch.int32)
        return Scores(
            mask,
            nothing,
            nothing,
            nothing,
            torch.tensor([BY_DISTANCE], dtype=torch.int32),
            distances,
            0,
        )

    @staticmethod
    def stacked(scores: Sequence[Scores]) -> Scores:
        """Several sequences as one, in which they follow one another and see nothing of each other.

        Raises ValueError without any, or if their `distances` or `other` differ; TypeError for what
        is no Scores.
        """
        for each in scores:
            if not isinstance(each, Scores):
                raise TypeError(
                    f"scores of several sequences must be Scores, got {type(each).__name__}"
                )
        mask = Mask.stacked([each.mask for each in scores])
        first, groups, pairs = scores[0], 0, 0
        parts: list[tuple[Tensor, ...]] = []
        for each in scores:
            if not each._distances.equal(first._distances) or each.other != first.other:
                raise ValueError(
                    "scores of several sequences must have the same distances and the same other row"
                )
            start, stop, group, _, _ = each._runs
            # whatever numbers they have, they are to differ
            numbers, index = group.unique(return_inverse=True)
            group = (index + groups).int().repeat_interleave(stop - start)
            parts.append((group, each._base + pairs, each._segment, each._pairs))
            groups, pairs = groups + len(numbers), pairs + len(each._pairs)
        group, base, segment, pairs_of_all = (torch.cat(same) for same in zip(*parts, strict=True))
        return Scores(mask, group, base, segment, pairs_of_all, first._distances, first.other)

    @property
    def seq_len(self) -> int:
        return self.mask.seq_len

    @property
    def reach(self) -> int:
        """The distance from which on all are alike."""
        return len(self._distances) // 2

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows that a table must have."""
        return int(torch.cat((self._pairs, self._distances, torch.tensor([self.other]))).max()) + 1

    @functools.cached_property
    def digest(self) -> str:
        """Tells these from others, alike in every process."""
        numbers = self._runs, self._pairs, self._distances
        sizes = [x.numel() for x in numbers]
        found = hashlib.blake2b(f"{self.mask.digest} {self.other} {sizes}".encode(), digest_size=16)
        for x in numbers:
            found.update(x.contiguous().numpy().data)
        return found.hexdigest()

    def tokens(self, positions: Tensor) -> Tensor:
        """What kernels know of the tokens at `positions` (T,): group, base, segment and position,
        (4, T) int32.
        """
        return torch.stack(
            (*(x[positions] for x in (self._group, self._base, self._segment)), positions.int())
        )

    def dense(self) -> Tensor:
        """(seq_len, seq_len) int64, the row of query (row) and key (column), also of pairs that are
        not visible.

        For tests: it takes O(n^2) memory.
        """
        ahead = torch.arange(self.seq_len) - torch.arange(self.seq_len).unsqueeze(1)
        by_distance = self._distances[ahead.clamp(-self.reach, self.reach) + self.reach]
        same = self._group.unsqueeze(1) == self._group
        entries = (self._base.unsqueeze(1) + self._segment).where(same, 0)
        rows = self._pairs[entries]
        rows = rows.where(rows != BY_DISTANCE, by_distance)
        return rows.where(same, self.other).long()

    @functools.cached_property
    def terms(self) -> tuple[Term, ...]:
        """The visible pairs in parts, those without a row first, if there are any."""
        if (
            len(self._long_segments) == len(self._long_groups) == 1
            and self._long_segments[0].of is None
        ):
            return (Term(None, self.mask),)
        areas: dict[int | None, list[Slice]] = {}
        for s in self.mask.slices:
            for row, area in self._areas(s):
                areas.setdefault(row, []).append(area)
        by_area = sorted(
            areas.keys() - {None, BY_DISTANCE},
            key=lambda row: (sum(s.area for s in areas[row]), row),
        )
        for row in by_area[:-_MOST_TERMS]:
            areas.setdefault(None, []).extend(areas.pop(row))
        order = sorted(areas, key=lambda row: -2 if row is None else row)
        return tuple(
            Term(row, Mask(self.seq_len, tuple(_join_slices(areas[row])))) for row in order
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scores) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"<scores of {self.seq_len} tokens in {self._runs.shape[1]} segments, {self.num_rows} rows>"

    def _check_rows(self) -> None:
        """Whether all rows are numbers of rows."""
        rows = torch.cat((self._pairs[self._pairs != BY_DISTANCE], self._distances))
        if (least := min(int(rows.min()), self.other)) < 0:
            raise ValueError(f"rows of the table cannot be negative, got {least}")
        if self.other >= 1 << 31:
            raise ValueError(
                f"other is a row of a table, below 2^31; got a number of {self.other.bit_length()} bits"
            )

    def _check_entries(self) -> None:
        """Whether all pairs of a group are among `pairs`."""
        _, _, group, *entries = self._runs
        groups, index = group.unique(return_inverse=True)
        empty = torch.zeros_like(groups)
        (least, most), (first, last) = (
            [
                empty.scatter_reduce(0, index, x, reduce, include_self=False)
                for reduce in ("amin", "amax")
            ]
            for x in entries
        )
        lowest, highest = int((least + first).min()), int((most + last).max())
        if lowest < 0 or highest >= len(self._pairs):
            reach = f"base + segment reaches from {lowest} to {highest}"
            raise ValueError(f"{reach}, but there are {len(self._pairs)} pairs")

    @functools.cached_property
    def _runs(self) -> Tensor:
        """Ranges of tokens of one segment of one group: start, stop, group, base and segment of
        each, (5, runs) int64.

        There are far fewer than tokens, so that what follows looks at these.
        """
        numbers = torch.stack((self._group, self._base, self._segment))
        ends = (numbers[:, 1:] != numbers[:, :-1]).any(0).nonzero().flatten() + 1
        bounds = torch.cat((torch.tensor([0]), ends, torch.tensor([self.seq_len])))
        return torch.cat(
            (bounds[:-1].unsqueeze(0), bounds[1:].unsqueeze(0), numbers[:, bounds[:-1]])
        )

    @functools.cached_property
    def _long_segments(self) -> list[_LabelledSpan]:
        """The sequence in long runs of a segment, and what is between them."""
        runs = self._runs[:, self._runs[1] - self._runs[0] >= _LONG].T.tolist()
        return self._with_gaps(
            [_LabelledSpan((start, stop), _Segment(*segment)) for start, stop, *segment in runs]
        )

    @functools.cached_property
    def _long_groups(self) -> list[_LabelledSpan]:
        """The sequence in long runs of a group, and what is between them."""
        found = []
        for group, runs in itertools.groupby(self._runs.T.tolist(), key=lambda run: run[2]):
            spans = [run[:2] for run in runs]
            if (stop := spans[-1][1]) - (start := spans[0][0]) >= _LONG:
                found.append(_LabelledSpan((start, stop), group))
        return self._with_gaps(found)

    def _with_gaps(self, spans: Sequence[_LabelledSpan]) -> list[_LabelledSpan]:
        found, at = [], 0
        for each in (*spans, _LabelledSpan((self.seq_len, self.seq_len), None)):
            start, stop = each.span
            found += [_LabelledSpan((at, start), None)] * (at < start) + [each] * (start < stop)
            at = stop
        return found

    def _areas(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        """A visible slice in parts, each with its row or None."""
        for part, mine, theirs in _parts(s, self._long_groups):
            if mine is not None and theirs is not None and mine != theirs:
                yield self.other, part
            else:
                yield from self._areas_of_segments(part)

    def _areas_of_segments(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        for part, mine, theirs in _parts(s, self._long_segments):
            if mine is None or theirs is None:
                yield None, part
            elif (row := self._row(mine, theirs)) == BY_DISTANCE:
                yield from self._bands(part)
            else:
                yield row, part

    def _row(self, mine: _Segment, theirs: _Segment) -> int:
        """Of queries of one segment and keys of another."""
        return (
            self.other
            if mine.group != theirs.group
            else int(self._pairs[mine.base + theirs.segment])
        )

    def _bands(self, s: Slice) -> Iterator[tuple[int | None, Slice]]:
        """A slice of one segment: what is near, and what is far on either side where that is much."""
        low, high = -math.inf if s.low is None else s.low, math.inf if s.high is None else s.high
        edges = (1 - self.reach, self.reach) if self.reach else ()
        for start, stop in itertools.pairwise([low, *(x for x in edges if low < x < high), high]):
            far = int(self._distances[-1]) if stop <= 1 - self.reach else int(self._distances[0])
            near = 1 - self.reach <= start < self.reach
            lowest, highest = (None if math.isinf(x) else int(x) for x in (start, stop))
            part = Slice(s.q, s.kv, lowest, highest)
            if part.area:
                yield (BY_DISTANCE if near else far), part


def _parts(s: Slice, spans: Sequence[_LabelledSpan]) -> Iterator[tuple[Slice, Any, Any]]:
    """A visible slice in parts, and whose their queries and keys are."""
    for (q, mine), (kv, theirs) in itertools.product(_within(s.q, spans), _within(s.kv, spans)):
        part = s._replace(q=q, kv=kv)
        if part.area:
            yield part, mine, theirs


def _within(span: Span, spans: Sequence[_LabelledSpan]) -> Iterator[_LabelledSpan]:
    """The spans of a range; a short part of a long run counts as what is between them."""
    first = bisect.bisect_right(spans, span[0], key=_stop)
    for one, of in itertools.islice(spans, first, None):
        part = overlap(one, span)
        if not length(part):
            return
        yield _LabelledSpan(part, of if length(part) >= _LONG else None)


def _stop(each: _LabelledSpan) -> int:
    return each.span[1]


def distance_rows(num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of every distance key - query from -reach to reach: (2 reach + 1,) int32, for
    `Scores.distances`.

    With half = num_buckets // 2, exact = half // 2 and a = |key - query|:  g(a) = a if a < exact,
    else min(half - 1, exact + trunc(ln(a / exact) / ln(max_distance / exact) (half - exact))), plus
    half where the key is ahead of the query. Logarithm and quotient are fp32, as in the models that
    were trained so. (T5's bidirectional buckets, arXiv 1910.10683, as CPM-Live has them.) From
    reach on g is half - 1.

    Raises ValueError for fewer than 4 buckets or a max_distance that is not beyond the exact ones,
    TypeError for what is no whole number.
    """
    num_buckets, max_distance = (
        as_int("num_buckets", num_buckets),
        as_int("max_distance", max_distance),
    )
    half = num_buckets // 2
    exact = half // 2
    if num_buckets < 4 or max_distance <= exact:
        raise ValueError(
            f"{num_buckets} buckets need a distance beyond {exact}, and to be 4 or more; got {max_distance}"
        )
    away = torch.arange(max_distance + 1)
    quotient = (
        torch.log(away.clamp(min=1).float() / exact)
        / math.log(max_distance / exact)
        * (half - exact)
    )
    bucket = torch.where(away < exact, away, (exact + quotient.long()).clamp(max=half - 1))
    reach = int((bucket == half - 1).nonzero()[0])
    bucket = bucket[: reach + 1].int()
    return torch.cat((bucket.flip(0), bucket[1:] + half))


def _join_slices(slices: Sequence[Slice]) -> list[Slice]:
    """The same pairs in fewer slices: those side by side that differ in their keys, or in their
    queries, alone.
    """
    by_keys: list[Slice] = []
    for s in sorted(slices, key=lambda s: (s.q, _order_bands(s), s.kv)):
        last = by_keys[-1] if by_keys else None
        if last and last.q == s.q and last[2:] == s[2:] and last.kv[1] == s.kv[0]:
            by_keys[-1] = s._replace(kv=(last.kv[0], s.kv[1]))
        else:
            by_keys.append(s)
    by_queries: list[Slice] = []
    for s in sorted(by_keys, key=lambda s: (s.kv, _order_bands(s), s.q)):
        last = by_queries[-1] if by_queries else None
        if last and last.kv == s.kv and last[2:] == s[2:] and last.q[1] == s.q[0]:
            by_queries[-1] = s._replace(q=(last.q[0], s.q[1]))
        else:
            by_queries.append(s)
    return by_queries


def _order_bands(s: Slice) -> tuple[bool, int, int]:
    return s[2:] != (None, None), s.low or 0, s.high or 0


def _check_integers(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != 1 or x.dtype != torch.int32 or x.device.type != "cpu":
        raise TypeError(
            f"{name} must be int32 of one dimension on the CPU, got {tuple(x.shape)} {x.dtype} on {x.device}"
        )
