"""The first difference between the masks or the layouts of two ranks, in words for an error.

Arguments are plain numbers, as JSON has them: ranks send them once digests differ.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from .layout import describe_run
from .mask import Slice
from .span import Span, merged, overlap

_MOST_SPANS = 4  # of the keys that a query sees

Pair = tuple[int, int]


def mask_difference(one: Iterable[Any], other: Iterable[Any], ranks: Pair = (0, 1)) -> str:
    """Return the first query that sees other keys, and the keys that it sees on each rank.

    one, other  the slices of the masks of `ranks`: (q, kv, low, high), q and kv as (start, stop)

    Returns "" if all queries see the same keys. Masks may still differ in their lengths.
    """
    masks = [[Slice(tuple(q), tuple(kv), *band) for q, kv, *band in x] for x in (one, other)]
    # Slices of a mask are disjoint. So those of both masks make no difference.
    rest = [set(masks[0]) - set(masks[1]), set(masks[1]) - set(masks[0])]
    later = [sorted(slices, key=lambda s: s.q, reverse=True) for slices in rest]
    here: tuple[list[Slice], list[Slice]] = [], []  # those that have the queries of `rows`
    for rows in itertools.pairwise(sorted({cut for slices in rest for s in slices for cut in s.q})):
        for now, waiting in zip(here, later, strict=True):
            now[:] = [s for s in now if s.q[1] > rows[0]]
            while waiting and waiting[-1].q[0] == rows[0]:
                now.append(waiting.pop())
        if _differ(rows, *here):
            start, stop = rows
            ends = range(start + 1, stop)
            query = start + bisect_left(ends, True, key=lambda end: _differ((start, end), *here))
            first, second = (_list_keys(query, mask) for mask in masks)
            seen = f"{first} on rank {ranks[0]} and {second} on rank {ranks[1]}"
            return f"the first query that differs is {query}: it sees {seen}"
    return ""


def layout_difference(
    one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]], ranks: Pair = (0, 1)
) -> str:
    """Return the first run that two layouts put on a rank differently.

    one, other  for each rank of the layouts of `ranks` its runs: (start, stop, step)

    Returns "" if all runs are the same.
    """
    for owner, shards in enumerate(itertools.zip_longest(one, other, fillvalue=())):
        for pair in itertools.zip_longest(*shards):
            first, second = (None if x is None else range(*x) for x in pair)
            if first != second:
                mine, others = (
                    f"tokens {describe_run(x)}" if x else "no more tokens" for x in (first, second)
                )
                one_puts = f"rank {ranks[0]} puts {mine} on rank {owner}"
                return f"{one_puts}, rank {ranks[1]} puts {others} there"
    return ""


def _differ(rows: Span, one: Sequence[Slice], other: Sequence[Slice]) -> bool:
    """Whether some of these queries see other keys: then a mask has pairs that the other lacks."""
    a, b = ([s._replace(q=overlap(s.q, rows)) for s in x] for x in (one, other))
    shared = sum(s.intersect(t).area for s in a for t in b)
    return not sum(s.area for s in a) == shared == sum(s.area for s in b)


def _list_keys(query: int, slices: Sequence[Slice]) -> str:
    """Return the keys that a query sees as text."""
    here = [s._replace(q=(query, query + 1)) for s in slices if s.q[0] <= query < s.q[1]]
    spans = merged(s.seen for s in here if s.area)
    words = [describe_run(range(*span)) for span in spans[:_MOST_SPANS]]
    if more := len(spans[_MOST_SPANS:]):
        words.append(f"... {more} more span{'s' * (more > 1)}")
    return f"keys {', '.join(words)}" if words else "no key"
