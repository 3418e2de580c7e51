"""The order in which a run takes rows from several sources, in fixed shares.

The source of sample n follows from the shares and n alone. Two sources with shares p and 1 - p are
a pair: the first has floor(n p + 1/2) of the first n samples. More sources are a tree of pairs, as
in a Huffman code, where the two smallest shares become a pair.

A source is off by less than 2 rows of its n p. For a proof, let a node of the tree be off by e. Its
two parts are then off by at most 1/2 + s e, where s is the part's share in the node. A part that is
a pair has s <= 2/3, because its own parts were the smallest shares. So pairs are off by up to 3/2.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class _Pair:
    """Two sources or pairs. `share` is the share of the first one in both."""

    first: str | _Pair
    second: str | _Pair
    share: Fraction

    def count_first(self, samples: int) -> int:
        """Return how many of the first `samples` samples of this pair are of the first one."""
        part, whole = self.share.numerator, self.share.denominator
        return (2 * samples * part + whole) // (2 * whole)


class Interleaving:
    """The order of samples from sources with positive weights, which are normalised to `shares`."""

    def __init__(self, weights: Mapping[str, Fraction]):
        total = sum(weights.values())
        self.shares = {name: weight / total for name, weight in weights.items()}
        self._root = _make_tree(self.shares)

    def locate(self, sample: int) -> tuple[str, int]:
        """Return the source of sample number `sample` of the run, and its number in that source."""
        node = self._root
        while isinstance(node, _Pair):
            before = node.count_first(sample)
            if node.count_first(sample + 1) > before:
                node, sample = node.first, before
            else:
                node, sample = node.second, sample - before
        return node, sample

    def count(self, samples: int) -> dict[str, int]:
        """Return how many of the first `samples` samples each source has."""
        counts, open_nodes = dict.fromkeys(self.shares, 0), [(self._root, samples)]
        while open_nodes:
            node, its = open_nodes.pop()
            if isinstance(node, _Pair):
                first = node.count_first(its)
                open_nodes += [(node.first, first), (node.second, its - first)]
            else:
                counts[node] = its
        return counts


def _make_tree(shares: Mapping[str, Fraction]) -> str | _Pair:
    """Return the tree of pairs. It does not depend on the order of `shares`."""
    heap: list[tuple[Fraction, str, str | _Pair]] = [
        (share, name, name) for name, share in shares.items()
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (small, name, first), (large, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        pair = _Pair(first, second, small / (small + large))
        heapq.heappush(heap, (small + large, name, pair))  # names are different
    [(_, _, root)] = heap
    return root
