"""The documents of a mask and their work, for the balanced layout."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence

from .mask import Mask, Slice


class Piece:
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

    def cut(self, tokens: int) -> tuple[Piece, Piece]:
        """Return the first `tokens` tokens, and the others. Either may have none."""
        middle = self.start + tokens
        return Piece(self.start, middle, self.seen), Piece(middle, self.stop, self.seen)


def find_documents(mask: Mask) -> list[Piece]:
    """Return the parts of the mask, whole."""
    starts = [s.q[0] for s in mask.slices]
    documents = []
    for start, stop in mask.parts:
        slices = mask.slices[bisect_left(starts, start) : bisect_left(starts, stop)]
        documents.append(Piece(start, stop, _pair_counter(start, stop, slices)))
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
