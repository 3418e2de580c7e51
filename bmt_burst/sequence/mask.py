"""Masks: which (query, key) pairs of a whole sequence are visible.

A mask is data. It consists of disjoint slices. Each slice is a rectangle of positions in which a
band along the diagonal is visible. Queries and keys may be two sequences of different lengths.
Positions of each start at 0. Planning takes longer with each slice. Nothing else knows kinds of
masks.

Try `print(Mask.documents((0, 9, 30, 64)))`.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.arguments import as_bool, as_int, check_iterable
from .span import Span, hull, length, merged, overlap, shifted
from .tile import flipped
from .trees import Depths, cut_at_depths, join_depths, read_tree

_DRAWN = 32  # rows and columns of a drawing, at most
_SHADES = " .:+#"
_MOST_PLAIN = 256  # kept in a cache
# the largest length, window or bound: a digest holds 64 bits of x and of 1 - x
_LARGEST = (1 << 63) - 1


class Slice(NamedTuple):
    """Query i of the positions `q` sees key j of the positions `kv` if low <= i - j < high.

    A bound of None hides nothing.
    """

    q: Span
    kv: Span
    low: int | None = None
    high: int | None = None

    @property
    def area(self) -> int:
        """The number of visible pairs."""
        rectangle = length(self.q) * length(self.kv)
        pairs = rectangle if self.low is None else _count_from(self.q, self.kv, self.low)
        too_far = 0 if self.high is None else _count_from(self.q, self.kv, self.high)
        return max(pairs - too_far, 0)

    @property
    def seen(self) -> Span:
        """The keys from the first to the last one that any query sees, if there are pairs."""
        return self.seen_from(self.q[0], self.q[1] - 1)

    def seen_from(self, first: int, last: int) -> Span:
        """Return the keys from the first to the last one that queries from `first` to `last` see.

        If they see none, the span's stop may not be after its start.
        """
        _, (start, stop), low, high = self
        if high is not None:
            start = max(start, first - high + 1)
        if low is not None:
            stop = min(stop, last - low + 1)
        return start, stop

    def intersect(self, other: Slice) -> Slice:
        """Return the slice of the pairs that both have."""
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        band = max(lows, default=None), min(highs, default=None)
        return Slice(overlap(self.q, other.q), overlap(self.kv, other.kv), *band)


@dataclass(frozen=True)
class Mask:
    """The visible pairs of `seq_len` queries and `kv_len` keys: those in `slices`. No pair may be
    in two slices.

    kv_len  by default seq_len. Then queries and keys usually are the same tokens.
    depths  of `tree`, None for other masks: rising runs (first token, its depth) of tokens whose
            depths rise by 1. Windows and positions go by depths

    Raises ValueError for slices that overlap or leave the sequence, and for numbers beyond 64 bits.
    Raises TypeError for anything but whole numbers.
    """

    seq_len: int
    slices: tuple[Slice, ...]
    kv_len: int = None  # type: ignore[assignment]  # it is a number once the mask is made
    depths: Depths | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        n, m = _lengths(self.seq_len, self.kv_len)
        slices = sorted((_check_slice(s, n, m) for s in self.slices), key=_start)
        _check_disjoint(slices)
        vars(self).update(seq_len=n, kv_len=m, slices=tuple(s for s in slices if s.area))

    @staticmethod
    def causal(seq_len: int, kv_len: int | None = None) -> Mask:
        """Return the mask in which every token sees itself and all earlier tokens.

        kv_len  the number of keys, if it differs. The queries are the last tokens of the keys, as
                in flash-attn. With fewer keys than queries, the first queries see nothing.
        """
        n, m = _lengths(seq_len, kv_len)
        return _mask(n, (Slice((0, n), (0, m), n - m),), m)

    @staticmethod
    def full(seq_len: int, kv_len: int | None = None) -> Mask:
        """Return the mask in which every query sees each of `kv_len` keys, by default seq_len."""
        n, m = _lengths(seq_len, kv_len)
        return _mask(n, (Slice((0, n), (0, m)),), m)

    @staticmethod
    def window(seq_len: int, window: int) -> Mask:
        """Return the mask in which query i sees keys i - window + 1 to i, as in MiniCPM."""
        return Mask.documents(
            (0, _positive("seq_len", seq_len)), window=_positive("window", window)
        )

    @staticmethod
    def documents(
        cu_seqlens: Sequence[int] | Tensor,
        causal: bool = True,
        window: int | None = None,
        *,
        kv_cu_seqlens: Sequence[int] | Tensor | None = None,
    ) -> Mask:
        """Return the mask in which tokens see only their own document.

        Document d has positions cu_seqlens[d] to cu_seqlens[d + 1] - 1.

        cu_seqlens     (0, ..., seq_len), a sequence or an integer tensor on the CPU. Two equal
                       numbers are an empty document.
        causal         whether tokens see no later ones
        window         tokens see only those less than `window` positions away
        kv_cu_seqlens  the keys of the same documents, if they differ: (0, ..., kv_len). The queries
                       of a document are the last tokens of its keys, as in `Mask.causal`.

        Raises ValueError for cu_seqlens that do not start at 0, decrease or end at 0, for a window
        below 1, and for another number of documents in kv_cu_seqlens. Raises TypeError for anything
        but whole numbers.
        """
        queries, keys = read_documents(cu_seqlens, kv_cu_seqlens)
        high = None if window is None else _positive("window", window)
        low = 0 if as_bool("causal", causal) else None if high is None else 1 - high
        spans = zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True)
        slices = [
            _move_band(Slice(q, kv, low, high), q[1] - kv[1])  # the last query is at the last key
            for q, kv in spans
            if q[0] < q[1] and kv[0] < kv[1]
        ]
        return _mask(queries[-1], slices, keys[-1])

    @staticmethod
    def tree(lengths: Sequence[int], parents: Sequence[int | None]) -> Mask:
        """Return the mask of trees of tokens, such as a prompt with several completions: a token
        sees the tokens of its node's ancestors, and itself and the earlier ones of its node.

        lengths  the tokens of each node. The nodes lie one after the other
        parents  the number of each node's parent, which comes before it, or None for a root

        `positions` are depths, and windows count by depth. Masks are smallest if each node is
        followed by all its descendants. Raises ValueError for lengths below 1, for parents that
        come later, and for another number of parents. Raises TypeError for anything but whole
        numbers and None.
        """
        nodes = read_tree(lengths, parents)
        slices = [
            Slice(queries, span, 0 if queries[0] == span[0] else None)
            for span, _, subtree in nodes
            for queries in subtree
        ]
        depths = join_depths([(span[0], depth) for span, depth, _ in nodes])
        n = _number("the sum of lengths", nodes[-1].span[1])
        return _mask(n, sorted(slices, key=_start), depths=depths)

    @staticmethod
    def stacked(masks: Sequence[Mask]) -> Mask:
        """Return the mask of several sequences, one after the other, that do not see each other.

        Raises ValueError without masks, and for trees next to masks without `positions`. Raises
        TypeError for anything but a Mask.
        """
        slices, start, kv_start = [], 0, 0
        depths: list[tuple[int, int]] = []
        if not masks:
            raise ValueError("expected at least one mask to stack, got none")
        if wrong := [x for x in masks if not isinstance(x, Mask)]:
            raise TypeError(f"expected Masks to stack, got {type(wrong[0]).__name__}")
        have_depths = any(mask.depths for mask in masks)
        for mask in masks:
            if have_depths:
                depths += [(start + at, depth) for at, depth in mask.find_depths()]
            by = start - kv_start
            slices += [
                _move_band(s._replace(q=shifted(s.q, start), kv=shifted(s.kv, kv_start)), by)
                for s in mask.slices
            ]
            start, kv_start = start + mask.seq_len, kv_start + mask.kv_len
        return _mask(start, slices, kv_start, join_depths(depths) or None)

    def find_depths(self) -> Depths:
        """Return the depths of a tree. In other masks a token's depth is its position in its
        document. Raises ValueError if it has none, as `positions` says.
        """
        if self.depths is not None:
            return self.depths
        hint = "make the mask by Mask.tree, or pass positions of your own"
        self.check_unbroken("positions()", hint)
        return tuple((start, 0) for start, _ in self.parts)

    def rows(self, start: int, stop: int) -> Mask:
        """Return the mask of queries start to stop - 1 and all keys.

        Raises ValueError unless 0 <= start < stop <= seq_len, TypeError unless these are integers.
        """
        rows = as_int("start", start), as_int("stop", stop)
        if not 0 <= rows[0] < rows[1] <= self.seq_len:
            got = f"start={rows[0]} and stop={rows[1]}"
            raise ValueError(f"expected rows 0 <= start < stop <= {self.seq_len}, got {got}")
        if length(rows) == self.seq_len:
            return self
        slices = [
            _move_band(s._replace(q=shifted(overlap(s.q, rows), -rows[0])), -rows[0])
            for s in self.slices
            if length(overlap(s.q, rows))
        ]
        found = [s for s in slices if s.area]
        return _mask(length(rows), sorted(found, key=_start), self.kv_len)

    def windowed(self, window: int) -> Mask:
        """Return the mask without the keys `window` or more positions before a query, which in a
        tree are positions of its branch.

        Raises ValueError for a mask of two lengths.
        """
        self.check_one_length("windowed()")
        high = _positive("window", window)
        if self.depths is None:
            slices = [_limit(s, high) for s in self.slices]
        else:
            slices = sorted(self._cut_windows(self.depths, high), key=_start)
        return _mask(self.seq_len, [s for s in slices if s.area], depths=self.depths)

    def _cut_windows(self, depths: Depths, high: int) -> Iterator[Slice]:
        """Yield the slices within a window of positions in a tree."""
        for s in self.slices:
            for q, behind in cut_at_depths(depths, s.q, self.seq_len):
                for kv, before in cut_at_depths(depths, s.kv, self.seq_len):
                    yield _limit(s._replace(q=q, kv=kv), high + behind - before)

    @functools.cached_property
    def area(self) -> int:
        """The number of visible pairs, from which FLOPs are counted."""
        return sum(s.area for s in self.slices)

    @property
    def seen(self) -> Span:
        """The keys from the first to the last one that any query sees, (0, 0) if none sees any."""
        return hull(s.seen for s in self.slices)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the mask. It is the same in every process."""
        numbers = array("q", [self.seq_len])
        if self.kv_len != self.seq_len:
            numbers.append(self.kv_len)
        for (a, b), (c, d), low, high in self.slices:
            numbers.extend((a, b, c, d, low is None, low or 0, high is None, high or 0))
        for run in self.depths or ():
            numbers.extend((-1, *run))
        return hashlib.blake2b(numbers.tobytes(), digest_size=16).hexdigest()

    @functools.cached_property
    def parts(self) -> tuple[Span, ...]:
        """The documents: the most parts of the sequence that do not see each other.

        Neighbouring tokens in no slice are one part. With two lengths these are parts of the
        queries: no slice has queries of two parts.
        """
        found, at = [], 0
        one_length = self.kv_len == self.seq_len
        for start, stop in _connect_slices(
            self.slices if one_length else [s._replace(kv=s.q) for s in self.slices]
        ):
            found += [(at, start)] * (at < start) + [(start, stop)]
            at = stop
        return tuple(found + [(at, self.seq_len)] * (at < self.seq_len))

    @functools.cached_property
    def first_break(self) -> int | None:
        """The first token that does not see the token before it in its document, or None. A window
        of 1 has none. Raises ValueError for a mask of two lengths.
        """
        self.check_one_length("positions in documents")
        near = [s for s in self.slices if (s.low is None or s.low <= 1)]
        ends = dict(
            merged(overlap(s.q, shifted(s.kv, 1)) for s in near if s.high is None or s.high > 1)
        )
        wide = [s for s in self.slices if (s.low, s.high) != (0, 1)]
        for start, stop in _connect_slices(wide):
            if (reached := ends.get(start + 1, start + 1)) < stop:
                return reached
        return None

    @functools.cached_property
    def transposed(self) -> Mask:
        """The mask with queries and keys exchanged. It has pair (i, j) if this mask has (j, i)."""
        slices = [Slice(*flipped(s)) for s in self.slices]
        return _mask(self.kv_len, sorted(slices, key=_start), self.seq_len, self.depths)

    @functools.cached_property
    def equal_keys(self) -> tuple[Span, ...]:
        """Rising ranges of keys. Exactly the same queries see all keys of a range. A key at which
        the band of a slice ends is in none.
        """
        edges, bands = {0, self.kv_len}, list[Span]()
        for (q_start, q_stop), kv, low, high in self.slices:
            edges.update(kv)
            for bound in (low, high):
                if bound is not None:  # some queries see the keys of this band, others do not
                    band = q_start - bound + 1, q_stop - bound
                    edges.update(x for x in band if kv[0] < x < kv[1])
                    bands.append(overlap(kv, band))
        found, uneven = [], iter((*merged(bands), (self.kv_len, self.kv_len)))
        band = next(uneven)
        for span in itertools.pairwise(sorted(edges)):
            while band[1] <= span[0]:
                band = next(uneven)
            if span[1] <= band[0]:
                found.append(span)
        return tuple(found)

    def check_one_length(self, what: str) -> None:
        """Raise ValueError if the numbers of queries and keys differ. `what` needs one sequence."""
        if self.kv_len != self.seq_len:
            got = f"{self.seq_len} queries and {self.kv_len} keys"
            expected = "expected a mask of queries and keys of one sequence"
            raise ValueError(f"{what}: {expected}, got one of {got}")

    def check_unbroken(self, what: str, hint: str) -> None:
        """Raise ValueError unless each token of a document sees the token before it."""
        if (token := self.first_break) is not None:
            raise ValueError(
                f"{what} expected documents in which each token sees the one before it, but token "
                f"{token} does not see token {token - 1}, as in a tree of drafts: {hint}"
            )

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """Return the position of each token in its document, for RoPE: (seq_len,) int64. In a tree
        it is the token's depth.

        Documents are `parts`. Raises ValueError unless each token of a document sees the token
        before it or the mask is a `tree`, and for a mask of two lengths.
        """
        starts, depths = torch.tensor(self.find_depths()).T
        lengths = torch.diff(starts, append=torch.tensor([self.seq_len]))
        offsets = (starts - depths).repeat_interleave(lengths)
        positions: Tensor = torch.arange(self.seq_len) - offsets
        return positions.to(device)

    def dense(self, device: torch.device | str | None = None) -> Tensor:
        """Return the mask as (seq_len, kv_len) bool: True where a query sees a key. For tests."""
        visible = torch.zeros(self.seq_len, self.kv_len, dtype=torch.bool, device=device)
        for s in self.slices:
            i, j = (torch.arange(*span, device=device) for span in (s.q, s.kv))
            distance = i.unsqueeze(1) - j
            inside = torch.ones_like(distance, dtype=torch.bool)
            if s.low is not None:
                inside &= distance >= s.low
            if s.high is not None:
                inside &= distance < s.high
            visible[slice(*s.q), slice(*s.kv)] |= inside
        return visible

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        shown = ", ".join(f"Slice{tuple(s)}" for s in self.slices[:3])
        more = ", ..." if len(self.slices) > 3 else ""
        keys = f", kv_len={self.kv_len}" if self.kv_len != self.seq_len else ""
        return f"Mask({self.seq_len}, ({shown}{more}){keys})"

    def __str__(self) -> str:
        """Describe the mask in a line and draw it. Rows are queries and columns are keys."""
        share = self.area / (self.seq_len * self.kv_len)
        parts = len(self.parts)
        tokens = f"{self.seq_len:,} tokens, {parts:,} document{'s' * (parts > 1)}"
        if self.depths is not None:
            tokens += f", {len(self.depths):,} branches"
        if self.kv_len != self.seq_len:
            tokens = f"{self.seq_len:,} queries, {self.kv_len:,} keys"
        pairs = f"{self.area:,} visible pairs ({share:.1%})"
        return "\n".join([f"{tokens}, {pairs}", *self._draw_rows()])

    def _draw_rows(self) -> Iterator[str]:
        """Draw squares of the mask, darker where more pairs are visible."""
        row_cuts, column_cuts = (
            [tokens * i // cells for i in range(cells + 1)]
            for tokens in (self.seq_len, self.kv_len)
            for cells in [min(_DRAWN, tokens)]
        )
        for rows in itertools.pairwise(row_cuts):
            crossing = [(s, q) for s in self.slices if length(q := overlap(s.q, rows))]
            line = []
            for columns in itertools.pairwise(column_cuts):
                visible = sum(s._replace(q=q, kv=overlap(s.kv, columns)).area for s, q in crossing)
                pairs = length(rows) * length(columns)
                line.append(_SHADES[-(-visible * (len(_SHADES) - 1) // pairs)])
            yield " ".join(line).rstrip()


@functools.lru_cache(maxsize=_MOST_PLAIN)
def plain_mask(seq_len: int, causal: bool = True, kv_len: int | None = None) -> Mask:
    """Return Mask.causal or Mask.full. All layers get one object, so that they share its plans."""
    return (Mask.causal if causal else Mask.full)(seq_len, kv_len)


def _mask(
    seq_len: int, slices: Sequence[Slice], kv_len: int | None = None, depths: Depths | None = None
) -> Mask:
    """Make a mask of slices that are known to be valid and in order."""
    mask, kv_len = object.__new__(Mask), seq_len if kv_len is None else kv_len
    vars(mask).update(seq_len=seq_len, slices=tuple(slices), kv_len=kv_len, depths=depths)
    return mask


def _lengths(seq_len: Any, kv_len: Any) -> tuple[int, int]:
    n = _positive("seq_len", seq_len)
    return n, n if kv_len is None else _positive("kv_len", kv_len)


def _limit(s: Slice, high: int) -> Slice:
    return s._replace(high=high if s.high is None else min(s.high, high))


def _move_band(s: Slice, by: int) -> Slice:
    """Return the slice with its band moved. Bounds beyond 64 bits hide the same pairs."""
    if not by:
        return s
    low, high = (
        None if bound is None else max(1 - _LARGEST, min(bound + by, _LARGEST))
        for bound in (s.low, s.high)
    )
    return s._replace(low=low, high=high)


def _count_from(q: Span, kv: Span, bound: int) -> int:
    """Count the pairs (i, j) of a rectangle with i - j >= bound.

    Pairs with i < i0, j >= j0 and i - j >= bound form a triangle. These are four of them, by
    inclusion and exclusion at the rectangle's corners.
    """
    (q_start, q_stop), (kv_start, kv_stop) = q, kv
    return (
        _triangle(q_stop - kv_start - bound)
        - _triangle(q_start - kv_start - bound)
        - _triangle(q_stop - kv_stop - bound)
        + _triangle(q_start - kv_stop - bound)
    )


def _triangle(side: int) -> int:
    return side * (side + 1) // 2 if side > 0 else 0


def _start(s: Slice) -> tuple[int, int]:
    """Return where a slice starts, by which slices are sorted."""
    return s.q[0], s.kv[0]


def _connect_slices(slices: Sequence[Slice]) -> tuple[Span, ...]:
    """Return the ranges of positions that slices connect, rising."""
    return merged((hull((s.q, s.kv)) for s in slices), gap=-1)


def _number(name: str, value: Any) -> int:
    if not 1 - _LARGEST <= (number := as_int(name, value)) <= _LARGEST:
        raise ValueError(f"{name} must be below 2^63, got a number of {number.bit_length()} bits")
    return number


def _positive(name: str, value: Any) -> int:
    if (number := _number(name, value)) < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def read_bounds(name: str, cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    """Return the bounds of documents, without empty documents. `name` is for errors."""
    return list(dict.fromkeys(_read_numbers(name, cu_seqlens)))


def _read_numbers(name: str, cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    if isinstance(cu_seqlens, Tensor):
        holds_integers = not cu_seqlens.is_floating_point() and cu_seqlens.dtype != torch.bool
        if cu_seqlens.dim() != 1 or not holds_integers:
            got = f"shape {tuple(cu_seqlens.shape)} and {cu_seqlens.dtype}"
            raise TypeError(f"{name} must be a tensor of integers of one dimension, got {got}")
        if cu_seqlens.device.type != "cpu":
            hint = f"make it there, or pass {name}.tolist()"
            raise ValueError(f"{name} must be on the CPU, got {cu_seqlens.device}: {hint}")
        cu_seqlens = cu_seqlens.tolist()
    bounds = [as_int(name, x) for x in check_iterable(name, cu_seqlens)]
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] == 0:
        got = ", ".join(map(str, bounds[:4])) + ", ..." * (len(bounds) > 4)
        raise ValueError(f"{name} must be (0, ..., tokens) with at least one token, got ({got})")
    for before, after in itertools.pairwise(bounds):
        if after < before:
            raise ValueError(f"{name} must not decrease, got {after} after {before}")
    _number(name, bounds[-1])
    return bounds


def read_documents(
    cu_seqlens: Sequence[int] | Tensor,
    kv_cu_seqlens: Sequence[int] | Tensor | None,
    kv_name: str = "kv_cu_seqlens",
) -> tuple[list[int], list[int]]:
    """Return the bounds of documents in queries and in keys, which errors call `kv_name`."""
    queries = _read_numbers("cu_seqlens", cu_seqlens)
    if kv_cu_seqlens is None:
        return queries, queries
    keys = _read_numbers(kv_name, kv_cu_seqlens)
    if len(keys) != len(queries):
        counts = f"{len(queries) - 1}, got {len(keys) - 1}"
        raise ValueError(f"expected {kv_name} of as many documents as cu_seqlens, {counts}")
    return queries, keys


def _check_slice(s: Any, seq_len: int, kv_len: int) -> Slice:
    if not isinstance(s, Slice):
        raise TypeError(f"slices must be Slices, got {type(s).__name__}")
    spans: list[Span] = []
    for name, span, tokens in (("q", s.q, seq_len), ("kv", s.kv, kv_len)):
        if not isinstance(span, Sequence) or len(span) != 2:
            raise TypeError(f"{name} of a slice must be (start, stop), got {span!r}")
        start, stop = (as_int(f"{name} of a slice", x) for x in span)
        if not 0 <= start <= stop <= tokens:
            kind = "tokens" if seq_len == kv_len else "queries" if name == "q" else "keys"
            raise ValueError(
                f"{name}=({start}, {stop}) of a slice is out of range: the mask has {tokens} {kind}"
            )
        spans.append((start, stop))
    low, high = (
        None if x is None else _number(name, x) for name, x in (("low", s.low), ("high", s.high))
    )
    return Slice(spans[0], spans[1], low, high)


def _check_disjoint(slices: Sequence[Slice]) -> None:
    """Raise ValueError if two slices share a pair. Slices are in the order of their queries."""
    active: list[Slice] = []
    for start, beginning in itertools.groupby(slices, key=lambda s: s.q[0]):
        active = [s for s in active if s.q[1] > start]
        known = len(active)
        active += beginning
        # Compare only slices with common keys: long masks have few of them.
        near: list[int] = []
        for i in sorted(range(len(active)), key=lambda i: active[i].kv):
            near = [j for j in near if active[j].kv[1] > active[i].kv[0]]
            for j in near:
                a, b = active[j], active[i]
                if max(i, j) >= known and a.intersect(b).area:
                    raise ValueError(f"slices overlap: Slice{tuple(a)} and Slice{tuple(b)}")
            near.append(i)
