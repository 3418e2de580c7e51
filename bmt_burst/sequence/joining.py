"""Keys of equal visibility, joined where they are neighbours in memory.

Keys that exactly the same queries see may lie in any order. So a tiling numbers them by rank: then
a rank has one run of them. Otherwise, a rank with its shares of 64 chunks has 128 runs, and each is
a message.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .layout import Layout
from .mask import Mask
from .span import Span


class Joined(Layout):
    """`layout`, with the tokens of each of the rising `spans` in the order of ranks. Tokens keep
    their places in the shards. Only their positions differ.
    """

    name = "joined"

    def __init__(self, layout: Layout, spans: Sequence[Span]):
        super().__init__(layout.seq_len, layout.size)
        starts = [start for start, _ in spans]
        self._ranges = []
        for shard in _index_shards(layout):
            found, at = list[range](), 0
            for index, (start, stop) in enumerate(spans):
                first, end = shard.count_before(start), shard.count_before(stop)
                found += shard.ranges(at, first)
                found.append(range(starts[index], starts[index] + end - first))
                starts[index], at = found[-1].stop, end
            self._ranges.append([*found, *shard.ranges(at, shard.ends[-1])])

    def ranges(self, rank: int) -> Sequence[range]:
        return self._ranges[rank]


def join_neighbours(layout: Layout, mask: Mask) -> Layout:
    """Return a layout of the mask's keys with fewer runs, in which shards and visible pairs are the
    same. Return `layout` itself if none has fewer.
    """
    starts = sorted(start for shard in _index_shards(layout) for start in shard.starts)

    def count_runs(span: Span) -> int:
        return bisect.bisect_left(starts, span[1]) - bisect.bisect_left(starts, span[0])

    spans = [span for span in mask.equal_keys if count_runs(span) > layout.size]
    return Joined(layout, spans) if spans else layout


class _Shard(NamedTuple):
    """The ranges of a shard, their starts, and the tokens before each of them and in all."""

    positions: Sequence[range]
    starts: list[int]
    ends: list[int]

    def count_before(self, position: int) -> int:
        index = bisect.bisect_left(self.starts, position) - 1
        if index < 0:
            return 0
        r = self.positions[index]
        return self.ends[index] + min(len(r), -((r.start - position) // r.step))

    def ranges(self, first: int, end: int) -> Iterator[range]:
        """Yield the positions of tokens first to end - 1."""
        index = bisect.bisect_right(self.ends, first) - 1
        while first < end:
            at = self.ends[index]
            found = self.positions[index][first - at : end - at]
            yield found
            first, index = first + len(found), index + 1


@functools.lru_cache(maxsize=16)  # all chunks of a sequence have one layout of keys
def _index_shards(layout: Layout) -> list[_Shard]:
    shards = []
    for positions in layout.shards:
        ends = [*itertools.accumulate(map(len, positions), initial=0)]
        shards.append(_Shard(positions, [r.start for r in positions], ends))
    return shards
