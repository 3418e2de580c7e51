"""Trees of tokens: the nodes of `Mask.tree`, and the depth of each token. Plain numbers."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..base.arguments import as_int, check_iterable
from .span import Span, merged, overlap

# rising runs (first token, its depth) of tokens whose depths rise by 1
Depths = tuple[tuple[int, int], ...]


class Node(NamedTuple):
    """Tokens that follow one another in all branches that have them.

    depth    how many tokens precede the first one in its branches
    subtree  the tokens that see them, rising
    """

    span: Span
    depth: int
    subtree: tuple[Span, ...]


def read_tree(lengths: Sequence[int], parents: Sequence[int | None]) -> list[Node]:
    """Return the nodes of trees, in the order of their tokens. A node and its only child are one if
    the child follows. Raises the errors of `Mask.tree`.
    """
    counts = [as_int("lengths", x) for x in check_iterable("lengths", lengths)]
    given = check_iterable("parents", parents)
    above = [None if x is None else as_int("parents", x) for x in given]
    if len(counts) != len(above) or not counts:
        got = f"{len(above)} parents and {len(counts)} lengths"
        raise ValueError(f"expected as many parents as lengths, at least one, got {got}")
    for i, (count, parent) in enumerate(zip(counts, above, strict=True)):
        if count < 1:
            raise ValueError(f"lengths[{i}] must be at least 1, got {count}")
        if parent is not None and not 0 <= parent < i:
            expected = f"None or an earlier node, 0 to {i - 1}" if i else "None"
            raise ValueError(f"parents[{i}] must be {expected}, got {parent}")
    starts, children = [0, *itertools.accumulate(counts)], Counter(above)
    # the place of each node among those that are kept, and their bounds, parents and depths
    place, spans, up, depths = list[int](), list[Span](), list[int | None](), list[int]()
    for i, parent in enumerate(above):
        if parent is not None and parent == i - 1 and children[parent] == 1:
            spans[-1] = spans[-1][0], starts[i + 1]
        else:
            at = None if parent is None else place[parent]
            up.append(at)
            depths.append(0 if at is None else depths[at] + spans[at][1] - spans[at][0])
            spans.append((starts[i], starts[i + 1]))
        place.append(len(spans) - 1)
    below: list[list[Span]] = [[span] for span in spans]
    subtrees: list[tuple[Span, ...]] = [()] * len(spans)
    for i in reversed(range(len(spans))):
        subtrees[i] = merged(below[i])
        if (parent := up[i]) is not None:
            below[parent] += subtrees[i]
    return [Node(*node) for node in zip(spans, depths, subtrees, strict=True)]


def join_depths(depths: Sequence[tuple[int, int]]) -> Depths:
    """Return the runs, without those that continue the one before."""
    found: list[tuple[int, int]] = []
    for start, depth in depths:
        if not found or start - found[-1][0] != depth - found[-1][1]:
            found.append((start, depth))
    return tuple(found)


def cut_at_depths(depths: Depths, span: Span, seq_len: int) -> Iterator[tuple[Span, int]]:
    """Yield the tokens of a span that are in each run, and how much their positions exceed their
    depths.
    """
    first = bisect.bisect_right(depths, span[0], key=lambda run: run[0]) - 1
    for number in range(first, len(depths)):
        start, depth = depths[number]
        if start >= span[1]:
            return
        stop = depths[number + 1][0] if number + 1 < len(depths) else seq_len
        yield overlap((start, stop), span), start - depth
