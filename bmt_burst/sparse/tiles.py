"""Queries that load the same blocks together, as the GPU's kernels take them.

QueryTiles   the union of the blocks that a few neighbouring queries chose
KeyLists     the queries that chose each block

Both are computed on the device of the choice, and the host waits for nothing. So their sizes are
bounds, which depend on shapes alone. They describe a whole sequence. `QueryTiles.between` and
`KeyLists.between` find the entries of the keys at hand.

Letters: S queries, G kv heads, N chosen blocks of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NONE = torch.iinfo(torch.int32).max  # where an entry that is no block starts: after all others
_NONE = tl.constexpr(NONE)
MOST_QUERIES = 32  # of a tile, the bits of a number
_PARTS = 512  # cuts through all lists together, at most
_SHORTEST = 1024  # entries between two cuts, at least


@dataclass(frozen=True)
class QueryTiles:
    """The unions of the blocks of neighbouring queries.

    starts  (G, tiles, W) int32: the first tokens of a tile's blocks, rising. The rest is NONE.
    chosen  (G, tiles, W) int32: bit i says whether query i of the tile chose the block
    """

    starts: Tensor
    chosen: Tensor

    @staticmethod
    def of_starts(starts: Tensor, tokens: int) -> QueryTiles:
        """Join the blocks of each `tokens` queries, which are a power of two and at most
        MOST_QUERIES.

        starts  (S, G, N) int32: the first tokens of blocks, -1 for none
        """
        queries, groups, most = starts.shape
        tiles, each = -(-queries // tokens), triton.next_power_of_2(most)
        width, size = tokens * most, tokens * each
        keys, union, chosen = starts.new_empty(3, groups, tiles, width).unbind()
        constants = {"TOKENS": tokens, "num_warps": min(max(size // 64, 1), 16)}
        _sort_keys[tiles, groups](
            starts, keys, starts.stride(), queries, most, EACH=each, **constants
        )
        _unite[groups * tiles,](keys, union, chosen, width, N=size, **constants)
        return QueryTiles(union, chosen)

    def between(self, low: int, high: int) -> Tensor:
        """Return the ranges of a tile's blocks that start at low .. high - 1: (G, tiles, 2) int32,
        the first one and the one after the last.
        """
        return torch.cat([_count_before(self.starts, bound) for bound in (low, high)], -1)


@dataclass(frozen=True)
class KeyLists:
    """The queries that chose each block, sorted by blocks.

    starts   (G, S N) int32: where the blocks start, rising. Entries of no block, NONE, come last.
    queries  (G, S N) int32: the queries, rising in each block
    parts    (G, S N) int32: how many parts have begun, up to each entry. Every list begins one, and
             so does every entry whose number is a multiple of `longest`.
    """

    starts: Tensor
    queries: Tensor
    parts: Tensor
    longest: int

    @staticmethod
    def of_starts(starts: Tensor) -> KeyLists:
        """Sort (query, block) pairs by blocks.

        starts  (S, G, N) int32: the first tokens of blocks, -1 for none
        """
        entries = len(starts) * starts.shape[2]
        longest = max(-(-entries // _PARTS), _SHORTEST)
        flat = torch.where(starts < 0, NONE, starts).int().transpose(0, 1).flatten(1).contiguous()
        flat, order = flat.sort(dim=-1, stable=True)
        cuts = torch.arange(entries, device=starts.device) % longest == 0
        begins_part = (_differs_from_last(flat) | cuts) & (flat != NONE)
        parts = _count_up_to(begins_part)
        return KeyLists(flat, (order // starts.shape[2]).int(), parts, longest)

    def between(self, low: int, high: int) -> ListParts:
        """Return the parts of the lists of blocks that start at low .. high - 1."""
        entries = self.starts.shape[1]
        long_parts = entries // self.longest
        # No two lists are of blocks that start at the same token.
        most = min(entries, high - low) + long_parts
        low_entry, high_entry = (_count_before(self.starts, bound) for bound in (low, high))
        begun = torch.cat([torch.zeros_like(low_entry), self.parts], 1)
        before, after = (begun.gather(1, x.long()) for x in (low_entry, high_entry))
        counts = after - before
        wanted = torch.arange(1, most + 2, device=counts.device, dtype=torch.int32)
        begins = torch.searchsorted(self.parts, before + wanted, out_int32=True)
        begins = torch.minimum(begins, high_entry)
        exists = wanted[:-1] <= counts
        starts = self.starts.gather(1, begins[:, :-1].clamp_max(entries - 1).long())
        starts = starts.masked_fill(~exists, NONE)
        follows = ~_differs_from_last(starts) & exists
        is_shared = follows.clone()
        is_shared[:, :-1] |= follows[:, 1:]
        place = _count_up_to(is_shared) - 1
        slots = place.masked_fill(~is_shared, -1)
        # what is not shared lands at the end, which is cut off
        held = starts.new_full((len(starts), most + 1), NONE)
        held.scatter_(1, place.masked_fill(~is_shared, most).long(), starts)
        held = held[:, : min(2 * long_parts, most)].contiguous()
        stops = torch.searchsorted(held, held, right=True, out_int32=True)
        stops = stops.masked_fill(~_differs_from_last(held) | (held == NONE), 0)
        return ListParts(starts, begins, counts.squeeze(1), slots, held, stops)


@dataclass(frozen=True)
class ListParts:
    """Parts of the lists of some blocks. A program sums up the gradients of each.

    starts  (G, most) int32: where a part's block starts, rising
    begins  (G, most + 1) int32: a part has the entries begins[i] .. begins[i + 1] - 1
    counts  (G,) int32: how many parts there are
    slots   (G, most) int32: where sums of a part are held if its block has several, else -1
    held    (G, slots) int32: where the block of a slot starts, rising. The rest is NONE.
    stops   (G, slots) int32: the slot after the last one of the block, 0 except at its first slot
    """

    starts: Tensor
    begins: Tensor
    counts: Tensor
    slots: Tensor
    held: Tensor
    stops: Tensor


@triton.jit(do_not_specialize=["queries", "most"])
def _sort_keys(
    starts, keys, strides, queries, most, TOKENS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Sort the blocks of a tile, a row of keys (G, tiles, TOKENS * most).

    A query is the last digit of a key. `blocks.MOST_TOKENS` leaves room for it.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, TOKENS * EACH)
    query, nth = at // EACH, at % EACH
    token = tile * TOKENS + query
    place = starts + token.to(tl.int64) * strides[0] + group * strides[1] + nth * strides[2]
    start = tl.load(place, mask=(token < queries) & (nth < most), other=-1)
    key = tl.where(start < 0, _NONE // TOKENS, start) * TOKENS + query
    # Padding is no block, so it is sorted to the end.
    row = (group * tl.num_programs(0) + tile).to(tl.int64) * (TOKENS * most)
    tl.store(keys + row + at, tl.sort(key), mask=at < TOKENS * most)


@triton.jit(do_not_specialize=["width"])
def _unite(keys, starts, chosen, width, TOKENS: tl.constexpr, N: tl.constexpr):
    """List the blocks of a row of rising keys, each once, with the bits of the queries that chose
    it. Entries of a block are neighbours, one for each query.
    """
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, N)
    key = tl.load(keys + row + at, mask=at < width, other=_NONE)
    last = tl.load(keys + row + at - 1, mask=(at > 0) & (at < width), other=-1)
    start, bits = key // TOKENS, 1 << key % TOKENS
    for ahead in tl.static_range(1, TOKENS):
        other = tl.load(keys + row + at + ahead, mask=at + ahead < width, other=_NONE)
        bits |= tl.where(other // TOKENS == start, 1 << other % TOKENS, 0)
    is_first = (start != _NONE // TOKENS) & ((last < 0) | (start != last // TOKENS))
    count = is_first.to(tl.int32)
    place = tl.cumsum(count, 0) - 1
    tl.store(starts + row + place, start, mask=is_first)
    tl.store(chosen + row + place, bits, mask=is_first)
    rest = (at >= tl.sum(count, 0)) & (at < width)
    tl.store(starts + row + at, _NONE, mask=rest)
    tl.store(chosen + row + at, 0, mask=rest)


def _differs_from_last(x: Tensor) -> Tensor:
    """Return whether each entry differs from the one before it. The first one does."""
    result = torch.ones_like(x, dtype=torch.bool)
    result[..., 1:] = x[..., 1:] != x[..., :-1]
    return result


def _count_up_to(x: Tensor) -> Tensor:
    """Return how many entries of each row of x (G, W) are true, up to each: int32.

    All rows are one scan. Torch would scan each long row by one block of threads.
    """
    total = x.flatten().cumsum(0, dtype=torch.int32).view_as(x)
    return total - total[:, :1] + x[:, :1].int()


def _count_before(starts: Tensor, bound: int) -> Tensor:
    """Return how many of the rising `starts` (..., W) are less than a bound: (..., 1) int32."""
    wanted = starts.new_full((*starts.shape[:-1], 1), bound)
    return torch.searchsorted(starts, wanted, out_int32=True)
