"""Heads: which rank computes which of them, and how many at a time. A span counts query heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...sequence.span import Span

# Rows of queries of a piece, over all of its heads, unless one head has more: received heads take
# memory.
_MOST_ROWS = 1 << 18
# Visible pairs of a piece, over all of its heads, times the head size. An H200 computes a forward
# and backward of these in 5 ms. In less, the host may not enqueue the next piece: at 8K tokens on
# two GPUs a forward took 2.8 ms in two pieces and 2.1 ms in one.
_PIECE_WORK = 3 << 36
_ENDS = 8  # of three pieces or more, the first one has one of so many heads, and so has the last


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
    work   the visible pairs of all these heads, times the head size, over `Scoring.host_work`

    Only two exchanges have no kernel to hide behind: the first that a rank receives, and the last
    that it returns. They are shorter if the first and the last piece have few heads. But the host
    enqueues each piece anew, so there are no more than the work pays for. All hosts have the same
    pieces, since the ring between them computes one after the other. A piece has whole kv heads
    where that is possible, because each piece receives its kv heads.
    """
    pieces = work // _PIECE_WORK
    if pieces < 2:
        return 0, heads
    # With two or three kv heads, pieces of whole ones are large.
    unit = ratio if heads >= (2 if ratio * rows <= _MOST_ROWS else 4) * ratio else 1
    units = -(-heads // unit)
    most = max(_MOST_ROWS // (unit * rows), 1)
    ends = max(min(-(-units // 2) if pieces == 2 else units // _ENDS, most), 1)
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
