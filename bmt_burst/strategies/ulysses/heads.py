"""Heads: which rank computes which of them, and how many at a time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ...sequence.span import Span
from ..compute import ALL

# Rows of queries, over all heads, that keep a GPU busy: about sixteen tiles for each SM.
_ENOUGH_ROWS = 1 << 18
# Visible pairs, over all heads, times the head size: with less, the host takes longer to enqueue
# three pieces than an H200 takes to compute them, 5 ms for a forward and backward.
_ENOUGH_WORK = 3 << 36
_ENDS = 8  # the first piece has one of so many heads, and so has the last
_ENOUGH_KV_HEADS = 4


class Heads(NamedTuple):
    """Some query heads of a rank, and the kv heads that they attend to."""

    q: Span
    kv: Span

    @staticmethod
    def of_rank(rank: int, size: int, heads: int, kv_heads: int) -> Heads:
        """Return the heads of a rank of `size` ranks."""
        q = heads * rank // size, heads * (rank + 1) // size
        return Heads(q, _kv_heads(*q, heads // kv_heads))

    def cut(self, cuts: Sequence[int], ratio: int) -> list[Heads]:
        """Cut the heads into pieces, which may be empty. `cuts` are those of `cut_heads`."""
        start, stop = self.q
        ends = [min(start + cut, stop) for cut in cuts]
        return [Heads((a, b), _kv_heads(a, b, ratio)) for a, b in itertools.pairwise(ends)]

    def split(self, ratio: int) -> list[tuple[slice, slice]]:
        """Split the query heads so that kernels take each part with its kv heads.

        There are up to three parts: some of the `ratio` query heads of one kv head, whole kv heads,
        and some of one again. Heads count from the first ones. A single part is all of them.
        """
        start, stop = self.q
        ends = {
            start,
            min(-(-start // ratio) * ratio, stop),
            max(stop // ratio * ratio, start),
            stop,
        }
        parts = [((a, b), _kv_heads(a, b, ratio)) for a, b in itertools.pairwise(sorted(ends))]
        if len(parts) == 1:
            return [(ALL, ALL)]
        return [
            (slice(a - start, b - start), slice(c - self.kv[0], d - self.kv[0]))
            for (a, b), (c, d) in parts
        ]


def cut_heads(heads: int, ratio: int, rows: int, work: int) -> tuple[int, ...]:
    """Return where the query heads of a rank are cut into pieces: rising, from 0 to `heads`.

    heads  the most query heads of a rank
    ratio  the query heads of a kv head
    rows   the rows of queries of a head: the tokens of the host with the most, over the batch
    work   the visible pairs of all these heads, times the head size, over
           `Scoring.host_work`

    Only two exchanges have no kernel to hide behind: the first that a rank receives, and the last
    that it returns. So the first and the last piece have an eighth of the heads. Pieces between
    them have at most `_ENOUGH_ROWS`, as received heads take memory. Fewer rows than that in all, or
    less than `_ENOUGH_WORK`, are one piece. All hosts have the same pieces, since the ring between
    them computes one after the other. A rank with a few kv heads or more does not cut between
    the query heads of one, because each piece would exchange that kv head again.
    """
    if heads * rows < _ENOUGH_ROWS or work < _ENOUGH_WORK:
        return 0, heads
    unit = ratio if heads >= _ENOUGH_KV_HEADS * ratio else 1
    units = -(-heads // unit)
    most = max(_ENOUGH_ROWS // (unit * rows), 1)
    ends = max(min(units // _ENDS, most), 1)
    middle = max(units - 2 * ends, 0)
    count = max(-(-middle // most), 1)
    cuts = {0, units, *(ends + middle * i // count for i in range(count + 1))}
    return tuple(min(cut * unit, heads) for cut in sorted(cuts))


def _kv_heads(start: int, stop: int, ratio: int) -> Span:
    return (start // ratio, -(-stop // ratio)) if start < stop else (0, 0)
