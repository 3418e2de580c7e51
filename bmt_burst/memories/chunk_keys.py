"""The keys of each chunk of a sequence: those that its queries see, and those that it keeps.

A chunk keeps the keys that later chunks see. Positions rise in a shard, so on each rank these are
the last ones of its share of the chunk. In memory they follow those of earlier chunks. While a
chunk is computed, all of its own keys follow them:

    kept of chunk 0 | kept of chunk 1 | ... | own keys of chunk n
              '----------- seen by chunk n --------------'

So the seen keys are one piece of memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ..sequence.layout import Chunked, Layout
from ..sequence.mask import Mask
from ..sequence.rows import limit_mask
from ..sequence.span import Span


@dataclass(frozen=True, eq=False)
class ChunkKeys:
    """The keys of a chunk, and their places in the memory of a rank.

    chunks  the layout of the chunks
    number  of this chunk
    rows    the mask of its queries and all keys, for each row or for all
    first   the first position that any of its queries sees, at most its own first one
    seen    the places of the keys from there to the end of the chunk
    own     the places of the chunk's own keys, the last of `seen`
    kept    the places of those that are kept, once the chunk is computed
    """

    chunks: Chunked
    number: int
    rows: tuple[Mask, ...]
    first: int
    seen: slice
    own: slice
    kept: slice

    @property
    def last(self) -> slice:
        """The places of the kept keys while the chunk is computed: the last of `own`."""
        return slice(self.own.stop - (self.kept.stop - self.kept.start), self.own.stop)

    @functools.cached_property
    def masks(self) -> tuple[Mask, ...]:
        """The mask of the chunk's queries and the seen keys, for each row or for all."""
        _, stop = self.chunks.spans[self.number]
        found = {row: row.transposed.rows(self.first, stop).transposed for row in set(self.rows)}
        return tuple(found[row] for row in self.rows)  # equal rows share an object

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of the seen keys."""
        return self.chunks.since(self.first, self.number)


@functools.lru_cache(maxsize=16)
def find_keys(
    masks: tuple[Mask, ...],
    chunks: Chunked,
    rank: int,
    window: int | None = None,
    keeps_all: bool = False,
) -> tuple[ChunkKeys, ...]:
    """Return the keys of each chunk.

    masks      of the whole sequence, for each row or for all. They have one length.
    window     that of the layer, if it has one
    keeps_all  whether each chunk keeps all of its keys, for later tokens than the masks have

    Raises ValueError for a mask in which a token sees a later chunk.
    """
    masks = tuple(limit_mask(mask, window) for mask in masks)
    cut = [{mask: mask.rows(*positions) for mask in set(masks)} for positions in chunks.spans]
    firsts = [
        _find_first(rows.values(), span) for rows, span in zip(cut, chunks.spans, strict=True)
    ]
    # by chunk, the first key that later ones see
    later = [*itertools.accumulate(firsts[:0:-1], min, initial=chunks.seq_len)][::-1]
    found, ends = list[ChunkKeys](), [0]  # the places after what each chunk keeps
    for number, first in enumerate(firsts):
        own = slice(ends[-1], ends[-1] + chunks.layouts[number].length(rank))
        before = chunks.find_chunk(first)
        is_own = before == number
        seen = own.start if is_own else ends[before + 1] - _count(chunks, rank, before, first)
        end = own.start + _count(chunks, rank, number, 0 if keeps_all else later[number])
        places = slice(seen, own.stop), own, slice(own.start, end)
        ends.append(end)
        rows = tuple(cut[number][mask] for mask in masks)
        found.append(ChunkKeys(chunks, number, rows, first, *places))
    return tuple(found)


def _find_first(rows: Iterable[Mask], positions: Span) -> int:
    """Return the first key that queries at some positions, with masks `rows`, see, or the first of
    these positions.
    """
    start, stop = positions
    seen = [mask.seen for mask in rows if mask.area]
    if any(end > stop for _, end in seen):
        raise ValueError(
            f"expected a mask in which no token sees a later chunk, as causal ones, but tokens of "
            f"positions {start} to {stop - 1} see keys from {stop} on"
        )
    return min([start, *(first for first, _ in seen)])


def _count(chunks: Chunked, rank: int, number: int, position: int) -> int:
    """Count the tokens of a rank in a chunk, from a position on."""
    start, stop = chunks.spans[number]
    return chunks.layouts[number].count(rank, (position - start, stop - start))
