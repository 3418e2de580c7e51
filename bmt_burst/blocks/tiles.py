"""Queries that load the same blocks together, as the GPU's kernels take them.

unite_blocks  the union of the blocks that a few neighbouring queries chose
KeyLists      the queries that chose each block

Both are computed once for a whole sequence, on the device of the choice, and the host waits for
nothing. So their sizes are bounds, which depend on shapes alone.

Letters: F queries that choose, G kv heads, N chosen blocks of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from .far import FarBlocks

NONE = torch.iinfo(torch.int32).max  # where an entry that is no block starts: after all others
_NONE = tl.constexpr(NONE)
MOST_QUERIES = 32  # of a tile, the bits of a number
_PARTS = 512  # cuts through all lists together, at most
_SHORTEST = 1024  # entries between two cuts, at least


def unite_blocks(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the unions of the blocks of each tile of `tokens` neighbouring queries, a power of two
    and at most MOST_QUERIES: (G, tiles, W) int32 each.

    starts  (F, G, N) int32: the first tokens of blocks, -1 for none

    The first tokens of a tile's blocks rise. The rest is NONE. Bit i of the second result says
    whether query i of the tile chose the block.
    """
    queries, groups, most = starts.shape
    tiles, each = -(-queries // tokens), triton.next_power_of_2(most)
    width, size = tokens * most, tokens * each
    keys, union, chosen = starts.new_empty(3, groups, tiles, width).unbind()
    constants = {"TOKENS": tokens, "num_warps": min(max(size // 64, 1), 16)}
    _sort_keys[tiles, groups](starts, keys, starts.stride(), queries, most, EACH=each, **constants)
    _unite[groups * tiles,](keys, union, chosen, width, N=size, **constants)
    return union, chosen


@dataclass(frozen=True)
class KeyLists:
    """The queries that chose each block, sorted by blocks and cut into parts. A program sums up the
    gradients of a part.

    tokens      (G, F N) int32: which tokens the queries are, rising in each block
    starts      (G, most) int32: where a part's block starts, rising. The rest is NONE.
    begins      (G, most + 1) int32: a part has the tokens begins[i] .. begins[i + 1] - 1
    slots       (G, most) int32: where sums of a part are held if its block has several, else -1
    slot_count  the number of slots at most
    """

    tokens: Tensor
    starts: Tensor
    begins: Tensor
    slots: Tensor
    slot_count: int

    @staticmethod
    def of_blocks(blocks: FarBlocks) -> KeyLists:
        """Sort (query, block) pairs by blocks. No two blocks start at the same token."""
        starts = blocks.starts
        entries = len(starts) * starts.shape[2]
        longest = max(-(-entries // _PARTS), _SHORTEST)
        long_parts = entries // longest
        most = min(entries, blocks.tokens) + long_parts
        flat = torch.where(starts < 0, NONE, starts).int().transpose(0, 1).flatten(1).contiguous()
        flat, order = flat.sort(dim=-1, stable=True)
        # Each list begins a part, and so does each entry whose number is a multiple of `longest`.
        cuts = torch.arange(entries, device=starts.device) % longest == 0
        begun = _count_up_to((_differs_from_last(flat) | cuts) & (flat != NONE))
        wanted = torch.arange(1, most + 2, device=starts.device, dtype=torch.int32)
        begins = torch.searchsorted(begun, wanted.repeat(len(flat), 1), out_int32=True)
        end = find_between(flat, 0, NONE)[:, 1:]
        begins = torch.minimum(begins, end)
        firsts = flat.gather(1, begins[:, :-1].clamp_max(entries - 1).long())
        firsts = firsts.masked_fill(begins[:, :-1] == end, NONE)
        follows = ~_differs_from_last(firsts) & (firsts != NONE)
        is_shared = follows.clone()
        is_shared[:, :-1] |= follows[:, 1:]
        slots = (_count_up_to(is_shared) - 1).masked_fill(~is_shared, -1)
        tokens = blocks.queries.int()[order // starts.shape[2]]
        return KeyLists(tokens, firsts, begins, slots, min(2 * long_parts, most))


def find_between(starts: Tensor, low: int, high: int) -> Tensor:
    """Return which of the rising `starts` (..., W) are low .. high - 1: (first, stop), int32."""
    bounds = starts.new_full((*starts.shape[:-1], 2), low)
    bounds[..., 1] = high
    return torch.searchsorted(starts, bounds, out_int32=True)


@triton.jit(do_not_specialize=["queries", "most"])
def _sort_keys(
    starts, keys, strides, queries, most, TOKENS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Sort the blocks of a tile, a row of keys (G, tiles, TOKENS * most). A query is the last digit
    of a key. `blocks.MOST_TOKENS` leaves room for it.
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
    """List each block of a row of rising keys once, with the bits of the queries that chose it."""
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
    return functional.pad(x[..., 1:] != x[..., :-1], (1, 0), value=True)


def _count_up_to(x: Tensor) -> Tensor:
    """Return how many entries of each row of x (G, W) are true, up to each: int32."""
    # one scan of all rows, as torch scans each long row by one block of threads
    total = x.flatten().cumsum(0, dtype=torch.int32).view_as(x)
    return total - total[:, :1] + x[:, :1].int()
