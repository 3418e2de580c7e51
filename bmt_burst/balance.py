"""The balanced layout: equal tokens and nearly equal work on every rank, with few documents cut.

Documents (the parts of a mask that see nothing of each other) go whole to the rank that has most work left for each
token it has left, the largest first. One that fits nowhere is shared: each rank peels some tokens off both of its ends,
as many early ones, which see little, and late ones, which see much, as give it its share of the work. For one causal
document that is the zigzag layout, for a window or a full mask nearly the contiguous one. Where that leaves ranks with
unequal work, the largest documents are kept for the end, to be shared so as to even it out.

Work is the number of visible pairs of a rank's queries. Plain numbers, no torch.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from .mask import Mask, Slice
from .span import Span, length, merged

_GOOD = 0.025  # of the mean: between the most and the least work of a rank
_MOST_KEPT = 32  # documents that are tried as those that even out
_CLOSE = 0.004  # of a rank's work: how near a peel comes to what it should take


@dataclass
class _Document:
    """What is left of a document: positions start to stop - 1 of the mask."""

    start: int
    stop: int
    slices: Sequence[Slice]
    work: int = 0

    def __post_init__(self):
        self.work = self.work_of(self.start, self.stop)

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    def work_of(self, start: int, stop: int) -> int:
        """Visible pairs of queries start to stop - 1."""
        total = 0
        for (a, b), kv, low, high in self.slices:
            a, b = max(a, start), min(b, stop)
            if a < b:
                total += Slice((a, b), kv, low, high).area
        return total


@dataclass
class _Rank:
    """What a rank still has to get, and the spans it has."""

    tokens: int
    work: float
    number: int
    spans: list[Span] = field(default_factory=list)

    @property
    def key(self) -> tuple[float, int]:
        """Ranks with most work left for each token come first."""
        return -self.work / self.tokens if self.tokens else 0.0, self.number

    def take(self, spans: Sequence[Span], work: int) -> None:
        self.spans += spans
        self.tokens -= sum(map(length, spans))
        self.work -= work


def balanced_spans(mask: Mask, size: int) -> list[tuple[Span, ...]]:
    """The positions of each rank: `mask.seq_len` tokens cut over `size` ranks, the first ones a token longer."""
    parts = _slices_of_parts(mask)
    best, least = None, float("inf")
    for kept in _tries(len(parts)):
        documents = [_Document(*span, slices) for span, slices in parts]
        documents.sort(key=lambda d: (-d.work, d.start))
        ranks = _dealt(documents, kept, mask, size)
        works = [rank.work for rank in ranks]
        unevenness = (max(works) - min(works)) * size / max(mask.area, 1)
        if unevenness < least:
            best, least = ranks, unevenness
        if unevenness <= _GOOD:
            break
    return [merged(rank.spans) for rank in best]


def _tries(documents: int) -> list[int]:
    """How many of the largest documents to keep for the end: one more each time, then many, then all."""
    few = list(range(min(documents, 4) + 1))
    more = [8, 16, _MOST_KEPT]
    return few + [count for count in more if 4 < count < documents] + [documents] * (documents > 4)


def _slices_of_parts(mask: Mask) -> list[tuple[Span, Sequence[Slice]]]:
    """Each part of the mask with its slices."""
    parts = mask.parts
    if len(parts) == len(mask.slices):  # a slice each, as documents have
        return [(span, (s,)) for span, s in zip(parts, mask.slices, strict=True)]
    found: list[tuple[Span, list[Slice]]] = [(span, []) for span in parts]
    starts = [start for start, _ in parts]
    for s in mask.slices:
        found[bisect.bisect_right(starts, s.q[0]) - 1][1].append(s)
    return found


def _dealt(documents: Sequence[_Document], kept: int, mask: Mask, size: int) -> list[_Rank]:
    """The ranks with all documents, of which the first `kept` are shared at the end."""
    small, longer = divmod(mask.seq_len, size)
    ranks = [_Rank(small + (r < longer), mask.area / size, r) for r in range(size)]
    slack = mask.area / size * _GOOD / 4
    heap = [rank.key for rank in ranks]
    heapq.heapify(heap)
    for document in documents[kept:]:
        if (rank := _fitting(heap, ranks, document, slack)) is not None:
            rank.take([(document.start, document.stop)], document.work)
            heapq.heappush(heap, rank.key)
        else:
            _share(document, ranks)
            heap = [rank.key for rank in ranks if rank.tokens]
            heapq.heapify(heap)
    for document in documents[:kept]:
        _share(document, ranks)
    return ranks


def _fitting(heap: list[tuple[float, int]], ranks: Sequence[_Rank], document: _Document, slack: float) -> _Rank | None:
    """Takes from the heap the first rank that has room for all of a document."""
    passed = []
    found = None
    while heap and found is None:
        key = heapq.heappop(heap)
        rank = ranks[key[1]]
        if rank.tokens >= document.tokens and rank.work + slack >= document.work:
            found = rank
        else:
            passed.append(key)
    for key in passed:
        heapq.heappush(heap, key)
    return found


def _share(document: _Document, ranks: Sequence[_Rank]) -> None:
    """Cuts a document over as few ranks as have room for its tokens and its work, those with most work left."""
    chosen: list[_Rank] = []
    room = work = 0.0
    for rank in sorted((rank for rank in ranks if rank.tokens), key=lambda r: (-r.work, -r.tokens, r.number)):
        if room >= document.tokens and work >= document.work * (1 - _GOOD / 4):
            break
        chosen.append(rank)
        room += rank.tokens
        work += max(rank.work, 0.0)
    for rank, tokens in zip(chosen, _shares(document.tokens, chosen), strict=True):
        if tokens:
            wanted = rank.work if tokens == rank.tokens else document.work * tokens / document.tokens
            spans = _peel(document, tokens, wanted)
            rank.take(spans, sum(document.work_of(*span) for span in spans))


def _shares(tokens: int, ranks: Sequence[_Rank]) -> list[int]:
    """How many of `tokens` each rank takes: in proportion to the work it has left, as far as it has room."""
    left, work = tokens, sum(max(rank.work, 0.0) for rank in ranks)
    room = sum(rank.tokens for rank in ranks)
    shares = []
    for rank in ranks:
        room -= rank.tokens
        share = round(left * max(rank.work, 0.0) / work) if work > 0 else min(left, rank.tokens)
        shares.append(max(min(share, rank.tokens, left), left - room))
        left -= shares[-1]
        work -= max(rank.work, 0.0)
    return shares


def _peel(document: _Document, tokens: int, work: float) -> list[Span]:
    """Takes `tokens` off the ends of a document, such that they have nearly so much work; returns their spans.

    From one end only if that is near enough.
    """
    start, stop = document.start, document.stop
    if tokens == document.tokens:
        document.start = stop
        return [(start, stop)]

    def of(early: int) -> int:
        late = tokens - early
        return document.work_of(start, start + early) + document.work_of(stop - late, stop)

    early = _matching(of, tokens, work)
    late = tokens - early
    document.start, document.stop = start + early, stop - late
    document.work = document.work_of(document.start, document.stop)
    return [span for span in ((start, start + early), (stop - late, stop)) if length(span)]


def _matching(of, tokens: int, work: float) -> int:
    """The number of early tokens, 0 to `tokens`, with which the work `of` it is nearest to the wanted one."""
    near = max(work, 1.0) * _CLOSE
    low, high = (0, of(0)), (tokens, of(tokens))
    for count, found in (low, high):
        if abs(found - work) <= near:
            return count
    if (low[1] - work) * (high[1] - work) > 0:  # out of reach
        return min((low, high), key=lambda end: abs(end[1] - work))[0]
    while high[0] - low[0] > 1:
        share = (low[1] - work) / (low[1] - high[1])
        step = round((high[0] - low[0]) * min(max(share, 0.1), 0.9))
        middle = min(max(low[0] + step, low[0] + 1), high[0] - 1)
        found = of(middle)
        if abs(found - work) <= near:
            return middle
        if (found - work) * (low[1] - work) > 0:
            low = middle, found
        else:
            high = middle, found
    return min((low, high), key=lambda end: abs(end[1] - work))[0]
