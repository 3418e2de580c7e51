"""The documents of a mask and their work, for the balanced layout."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from .mask import Mask, Slice


class Document:
    """The rest of a document: positions start to stop - 1 of the mask."""

    __slots__ = ("before", "density", "seen", "start", "stop", "tokens", "until", "work")

    def __init__(self, start: int, stop: int, seen: Callable[[int], int]):
        self.seen = seen  # the visible pairs of the document's queries before a position
        self.cut_to(start, stop)

    def cut_to(self, start: int, stop: int) -> None:
        self.start, self.stop, self.tokens = start, stop, stop - start
        self.before, self.until = self.seen(start), self.seen(stop)
        self.work = self.until - self.before
        self.density = self.work / self.tokens if self.tokens else 0.0

    def peeled(self, tokens: int, early: int) -> int:
        """Return the work of `tokens` off its ends, `early` of them off its start."""
        return self.work + self.seen(self.start + early) - self.seen(self.stop - tokens + early)

    def reach(self, tokens: int) -> tuple[int, int]:
        """Return the least and the most work of `tokens` tokens off its ends.

        This is right for documents that are thinner at one end.
        """
        first = self.seen(self.start + tokens) - self.before
        last = self.until - self.seen(self.stop - tokens)
        return (first, last) if first < last else (last, first)

    def share(self, tokens: int) -> float:
        """Return the mean work of as many of its tokens, as if it had infinitely many."""
        return tokens * self.density

    def fair(self, tokens: int) -> float:
        """Return its share, or the work nearest to it that tokens off its ends have."""
        if tokens >= self.tokens:
            return self.share(tokens)
        low, high = self.reach(tokens)
        return min(max(self.share(tokens), low), high)

    def count_early(self, tokens: int, work: float, slack: float) -> int:
        """Return how many of `tokens` to take off its start, so that they have `work`.

        It is none or all if possible. The others are taken off its end.
        """
        low = 0, self.until - self.seen(self.stop - tokens) - work
        high = tokens, self.seen(self.start + tokens) - self.before - work
        nearest = low if abs(low[1]) <= abs(high[1]) else high
        if abs(nearest[1]) <= slack or (low[1] > 0) == (high[1] > 0):
            return nearest[0]
        while high[0] - low[0] > 1 and abs(nearest[1]) > slack / 8:
            # along the line between them, and not too near to either
            way = low[1] / (low[1] - high[1])
            step = round((high[0] - low[0]) * min(max(way, 0.1), 0.9))
            early = min(max(low[0] + step, low[0] + 1), high[0] - 1)
            nearest = early, self.peeled(tokens, early) - work
            if (nearest[1] > 0) == (low[1] > 0):
                low = nearest
            else:
                high = nearest
        return nearest[0]


def find_documents(mask: Mask) -> list[Document]:
    """Return the parts of the mask."""
    starts = [s.q[0] for s in mask.slices]
    documents = []
    for start, stop in mask.parts:
        slices = mask.slices[bisect_left(starts, start) : bisect_left(starts, stop)]
        documents.append(Document(start, stop, _pair_counter(start, stop, slices)))
    return documents


def _pair_counter(start: int, stop: int, slices: Sequence[Slice]) -> Callable[[int], int]:
    """Return a function that counts the visible pairs of a part's queries before a position.

    Simple parts have a closed form.
    """
    size = stop - start
    if len(slices) == 1 and slices[0].q == slices[0].kv == (start, stop):
        _, _, low, high = slices[0]
        if low is None and high is None:
            return lambda i: (i - start) * size
        if low == 0:
            most = size if high is None else high
            return lambda i: _sum_ramp(i - start, most)
        if high is not None and low == 1 - high:
            most, behind = high, high - 1
            later = _sum_ramp(size - 1, behind)
            return lambda i: _sum_ramp(i - start, most) + later - _sum_ramp(stop - i - 1, behind)

    def pairs_before(i: int) -> int:
        before = (s._replace(q=(s.q[0], min(s.q[1], i))) for s in slices if s.q[0] < i)
        return sum(s.area for s in before)

    return pairs_before


def _sum_ramp(count: int, most: int) -> int:
    """Return the sum of min(i, most) for i from 1 to `count`."""
    return count * (count + 1) // 2 if count <= most else count * most - most * (most - 1) // 2
