"""Heads: which rank computes which of them, and how many at a time. A span counts query heads. With
it go the kv heads that these attend to (`kv_heads`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...sequence.span import Span

# Rows of queries, over all heads, that keep a GPU busy: about sixteen tiles for each SM.
_ENOUGH_ROWS = 1 << 18
# Visible pairs, over all heads, times the head size: with less, the host takes longer to enqueue
# three pieces than an H200 takes to compute them, 5 ms for a forward and backward.
_ENOUGH_WORK = 3 << 36
_ENDS = 8  # the first piece has one of so many heads, and so has the last
_ENOUGH_KV_HEADS = 4


def share_heads(heads: int, size: int) -> list[Span]:
    """Return the query heads of each of `size` ranks."""
    return list(itertools.pairwise(heads * rank // size for rank in range(size + 1)))


def kv_heads(heads: Span, ratio: int) -> Span:
    """Return the kv heads of some query heads, if each has `ratio` of them."""
    start, stop = heads
    return (start // ratio, -(-stop // ratio)) if start < stop else (0, 0)


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


def plan_pieces(heads: Sequence[Span], ratio: int, cuts: Sequence[int]) -> list[tuple[Span, ...]]:
    """Return the heads of each piece, by rank. Some ranks may have none.

    heads  the heads of each rank
    cuts   where each rank cuts its heads, from `cut_heads`

    A kernel takes some of the `ratio` query heads of one kv head, or those of whole kv heads. If
    the heads of a rank between two cuts are neither, they are up to three pieces.
    """
    pieces: list[tuple[Span, ...]] = []
    for first, last in itertools.pairwise(cuts):
        between = [(min(a + first, b), min(a + last, b)) for a, b in heads]
        pieces += itertools.zip_longest(*(_split(x, ratio) for x in between), fillvalue=(0, 0))
    return pieces


def _split(heads: Span, ratio: int) -> list[Span]:
    start, stop = heads
    whole = min(-(-start // ratio) * ratio, stop), max(stop // ratio * ratio, start)
    return list(itertools.pairwise(sorted({start, *whole, stop})))
