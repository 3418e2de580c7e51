"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents are `Mask.parts`. The work of a document is its number of visible pairs.

Lay the documents on a circle. For each rank, slide an arc of the rank's tokens along the circle
until the arc has the rank's share of the work. Give the arc to the rank, and close the circle
behind it. Such an arc always exists, up to one token: over all places on the circle, the mean work
of an arc is the rank's share (W. Stromquist and D. R. Woodall, "Sets on which several measures
agree", 1985).

An arc may cut a document at either end. So a rank takes the first arc that begins or ends between
two documents and has nearly its share, and only without one the arc that has it exactly. The search
begins where the circle was closed, with what the last arc left of a document. So one causal
document becomes nearly the zigzag layout, and a window or a full mask the contiguous one.

Kernels take longer for many short documents than for a few long ones with as many pairs. Therefore
documents lie on the circle in an order that gives each arc documents of all densities. A document
with half of the tokens would be an arc of its own for some ranks. If all others are short, these
are dealt out whole instead, and each rank takes an arc of the long one.

docs/results-masks.md has the measured gap to equal work. Nothing is random, so all ranks find the
same layout.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence

from .mask import Mask, Slice
from .span import Span, merged

_Arc = tuple[int, float]  # where an arc begins, and its work less the wanted work

# How far the work of a rank may be from its share, relative to that. The other ranks make up for
# it. A smaller value cuts more documents, a larger one unbalances the ranks.
_SLACK = 0.005
# How many arcs are tried before one may cut two documents. It bounds the time.
_TRIED = 128
# How often the gaps between the tried arcs are halved, if all have too much work or all too little.
# The document in the widest gap then has more work in its middle than at its ends, or less.
_HALVINGS = 4
# A short document has at most 1 / _SHORT of a rank's tokens.
_SHORT = 4
# How many more or fewer short documents than its share a rank may be dealt.
_MORE = 8
# 2^64 over the golden ratio: its multiples, modulo 2^64, are spread evenly, however many there are.
_GOLDEN = 0x9E3779B97F4A7C15


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """Return the positions of each of `size` ranks. The first ranks may have a token more."""
    documents = _find_documents(mask)
    longest = max(documents, key=lambda document: document.tokens)
    others = [document for document in documents if document is not longest]
    most = max((document.tokens for document in others), default=0)
    if 2 * longest.tokens >= mask.seq_len and most * size * _SHORT <= mask.seq_len:
        circle, short = _Circle([longest]), _Circle(_mix(others))
    else:
        circle, short = _Circle(_mix(documents)), _Circle([])
    found = []
    for rank in reversed(range(size)):
        tokens = (mask.seq_len + rank) // size
        share = (circle.work + short.work) * tokens / (circle.tokens + short.tokens)
        off, dealt, first = _find_share(circle, short, tokens, share, rank)
        if off > share * _SLACK and short.pieces:  # the long document cannot make up for the others
            circle, short = _Circle([*circle.pieces, *short.pieces]), _Circle([])
            off, dealt, first = _find_share(circle, short, tokens, share, rank)
        whole, short = short.take(0, dealt)
        arc, circle = circle.take(first, tokens - dealt)
        if not circle.pieces:  # the long document is used up
            circle, short = short, circle
        found.append(merged((piece.start, piece.stop) for piece in (*whole, *arc)))
    return found


def _mix(documents: Sequence[_Piece]) -> list[_Piece]:
    """Return the documents in an order in which neighbours have all densities."""
    by_density = sorted(documents, key=lambda x: (x.work / x.tokens, x.tokens, x.start))
    order = sorted(range(len(by_density)), key=lambda i: i * _GOLDEN % (1 << 64))
    return [by_density[i] for i in order]


def _find_share(
    circle: _Circle, short: _Circle, tokens: int, share: float, others: int
) -> tuple[float, int, int]:
    """Return how far a rank's work will be from its share, how many tokens of short documents to
    deal to it, and where its arc begins.

    others  the number of ranks after this one
    """
    if not others:
        return 0.0, short.tokens, 0
    fair = bisect_left(short.starts, short.tokens / (others + 1))
    counts = range(max(fair - _MORE, 0), min(fair + _MORE, len(short.pieces)) + 1)
    found = []
    for count in sorted(counts, key=lambda count: abs(count - fair)):
        dealt = short.starts[count]
        if 0 <= tokens - dealt <= circle.tokens:
            wanted = share - short.works[count]
            first, off = circle.find_arc(tokens - dealt, wanted, share * _SLACK)
            found.append((off, dealt, first))
            if off <= share * _SLACK:
                break
    return min(found, default=(math.inf, 0, 0))


class _Piece:
    """Some tokens of a document: positions start to stop - 1 of the mask.

    seen  counts the visible pairs of the document's queries before a position
    work  the visible pairs of these tokens
    """

    __slots__ = ("seen", "start", "stop", "work")

    def __init__(self, start: int, stop: int, seen: Callable[[int], int]):
        self.start, self.stop, self.seen = start, stop, seen
        self.work = seen(stop) - seen(start)

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def cut(self, tokens: int) -> tuple[_Piece, _Piece]:
        """Return the first `tokens` tokens, and the others. Either may have none."""
        middle = self.start + tokens
        return _Piece(self.start, middle, self.seen), _Piece(middle, self.stop, self.seen)


class _Circle:
    """Pieces of documents, each next to the following one, and the last next to the first.

    starts, works  the tokens and the work before each piece, and of all pieces
    """

    def __init__(self, pieces: Sequence[_Piece]):
        self.pieces = pieces
        self.starts = [*itertools.accumulate((x.tokens for x in pieces), initial=0)]
        self.works = [*itertools.accumulate((x.work for x in pieces), initial=0)]
        self.tokens, self.work = self.starts[-1], self.works[-1]

    def take(self, first: int, tokens: int) -> tuple[list[_Piece], _Circle]:
        """Return an arc, and the circle without it, which begins where the arc ended."""
        if not tokens:
            return [], self
        pieces = self._open_at(first % self.tokens)
        ends = [*itertools.accumulate(x.tokens for x in pieces)]
        last = bisect_left(ends, tokens)
        inside, after = pieces[last].cut(pieces[last].tokens - ends[last] + tokens)
        rest = [after, *pieces[last + 1 :]] if after.tokens else pieces[last + 1 :]
        return [*pieces[:last], inside], _Circle(rest)

    def _open_at(self, at: int) -> list[_Piece]:
        """Return all pieces from a token on."""
        index = bisect_right(self.starts, at) - 1
        before, after = self.pieces[index].cut(at - self.starts[index])
        pieces = [after, *self.pieces[index + 1 :], *self.pieces[:index]]
        return [*pieces, before] if before.tokens else pieces

    def find_arc(self, tokens: int, share: float, slack: float) -> tuple[int, float]:
        """Return where an arc with about this share of the work begins, and how far it is off."""
        tried: list[_Arc] = []
        for first in self._list_arcs(tokens):
            tried.append(self._measure_arc(first, tokens, share))
            if abs(tried[-1][1]) <= slack:
                return first, abs(tried[-1][1])
            if len(tried) % _TRIED == 0 and _find_crossing(tried):
                break
        for _ in range(_HALVINGS):
            if crossing := _find_crossing(tried):
                tried = [*self._narrow(*crossing, tokens, share)]
                break
            middles = ((a[0] + b[0]) // 2 for a, b in itertools.pairwise(tried))
            tried = sorted(tried + [self._measure_arc(at, tokens, share) for at in middles])
        first, excess = min(tried, key=lambda arc: abs(arc[1]))
        return first, abs(excess)

    def _list_arcs(self, tokens: int) -> Iterator[int]:
        """Yield the beginnings of arcs that begin or end between two pieces, once around the
        circle. The first arc ends where the circle begins.
        """
        bounds = self.starts[:-1]
        near = bisect_left(bounds, self.tokens - tokens)
        begins = itertools.chain((at - self.tokens for at in bounds[near:]), bounds[:near])
        yield from heapq.merge(begins, (at - tokens for at in bounds))
        yield self.tokens - tokens

    def _narrow(self, low: _Arc, high: _Arc, tokens: int, share: float) -> tuple[_Arc, _Arc]:
        """Return neighbours between two arcs, one with too much work and one with too little."""
        while high[0] - low[0] > 1:
            arc = self._measure_arc((low[0] + high[0]) // 2, tokens, share)
            low, high = (low, arc) if _differ(low, arc) else (arc, high)
        return low, high

    def _measure_arc(self, first: int, tokens: int, share: float) -> _Arc:
        return first, self._count_before(first + tokens) - self._count_before(first) - share

    def _count_before(self, at: int) -> int:
        """Count the work of the tokens before one, also of one before or after the first turn."""
        turn, at = divmod(at, self.tokens)
        index = bisect_right(self.starts, at) - 1
        piece = self.pieces[index]
        here = piece.seen(piece.start + at - self.starts[index]) - piece.seen(piece.start)
        return turn * self.work + self.works[index] + here


def _find_crossing(arcs: Sequence[_Arc]) -> tuple[_Arc, _Arc] | None:
    """Return the first neighbours of which one has too much work and one too little."""
    return next((pair for pair in itertools.pairwise(arcs) if _differ(*pair)), None)


def _differ(a: _Arc, b: _Arc) -> bool:
    return (a[1] > 0) != (b[1] > 0)


def _find_documents(mask: Mask) -> list[_Piece]:
    starts = [s.q[0] for s in mask.slices]
    documents = []
    for start, stop in mask.parts:
        slices = mask.slices[bisect_left(starts, start) : bisect_left(starts, stop)]
        documents.append(_Piece(start, stop, _pair_counter(start, stop, slices)))
    return documents


def _pair_counter(start: int, stop: int, slices: Sequence[Slice]) -> Callable[[int], int]:
    """Return a function that counts the visible pairs of a part's queries before a position.

    The most frequent parts have a closed form.
    """
    size = stop - start
    if len(slices) == 1 and slices[0].q == slices[0].kv == (start, stop):
        _, _, low, high = slices[0]
        if low is None and high is None:
            return lambda i: (i - start) * size
        if low == 0:
            most = size if high is None else high
            return lambda i: _sum_ramp(i - start, most)

    # A document may have thousands of slices. Few of them reach beyond a position.
    areas = [(s, s.area) for s in slices]

    @functools.cache
    def pairs_before(i: int) -> int:
        return sum(
            area if s.q[1] <= i else s._replace(q=(s.q[0], i)).area
            for s, area in areas
            if s.q[0] < i
        )

    return pairs_before


def _sum_ramp(count: int, most: int) -> int:
    """Return the sum of min(i, most) for i from 1 to `count`."""
    return count * (count + 1) // 2 if count <= most else count * most - most * (most - 1) // 2
