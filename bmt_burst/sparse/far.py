"""Attention to the chosen blocks beyond the window: the far part of sparse attention.

The window of query i are the keys i - window_size to i of its document. A dense kernel computes
them. The far part are the keys before i - window_size in the chosen blocks. So each pair is in one
part, and partial outputs merge by lse.

Neighbouring queries choose nearly the same blocks. So a tile of queries loads the union of their
blocks once, and hides from each query what it did not choose.

The keys at hand may be a part of the sequence: blocks outside of it are left out, so that several
parts add up.

Letters: S queries, H query heads, G kv heads, D head size, N chosen blocks, T keys at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype

_QUERIES = 64  # of a tile


@dataclass(frozen=True)
class FarBlocks:
    """The far blocks of some queries, as places in a sequence.

    starts      (S, G, N) int64: the first tokens of the blocks. Entries that are no block are -1.
    stops       (S,) int64: where the far part ends, so the first token of the window
    block_size  tokens of a block
    """

    starts: Tensor
    stops: Tensor
    block_size: int

    @staticmethod
    def of_choice(chosen: Tensor, starts: Tensor, stops: Tensor, block_size: int) -> FarBlocks:
        """Return the blocks before `stops` among those that `choose_in_document` returned.

        chosen  (S, G, N) int32
        starts  (S,) int64: where the query's document starts in the sequence
        """
        tokens = starts.view(-1, 1, 1) + chosen.long() * block_size
        is_far = (chosen >= 0) & (tokens < stops.view(-1, 1, 1))
        return FarBlocks(tokens.masked_fill(~is_far, -1), stops, block_size)


@dataclass(frozen=True)
class _Tile:
    """Some queries, and the keys that at least one of them looks at.

    queries  the indices of the queries
    keys     (U,) int64: the indices of the keys at hand
    visible  (S, U) bool: the pairs of the far part
    """

    queries: slice
    keys: Tensor
    visible: Tensor


def far_outputs(
    q: Tensor, k: Tensor, v: Tensor, blocks: FarBlocks, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention to the far keys among those at hand.

    q      (S, H, D)
    k, v   (T, G, D): tokens first .. first + T - 1 of the sequence
    scale  the factor of the scores

    Return out (S, H, D) and lse (H, S), natural log, in the accumulator's dtype. A query without a
    far key has an out of 0 and an lse of -inf.
    """
    wide, groups = accumulator_dtype(q.dtype), k.shape[1]
    out = torch.zeros_like(q, dtype=wide)
    lse = torch.full((q.shape[1], len(q)), -math.inf, dtype=wide, device=q.device)
    heads = q.shape[1] // groups
    for group in range(groups):
        of_group = slice(group * heads, (group + 1) * heads)
        for tile in _tiles(blocks, group, first, len(k)):
            rows = q[tile.queries, of_group].to(wide).transpose(0, 1)
            scores = _scores(rows, k[tile.keys, group].to(wide), tile, scale)
            part = scores.logsumexp(-1)
            sure = part.masked_fill(part == -math.inf, 0.0).unsqueeze(-1)
            probs = (scores - sure).exp()
            out[tile.queries, of_group] = (probs @ v[tile.keys, group].to(wide)).transpose(0, 1)
            lse[of_group, tile.queries] = part
    return out, lse


def far_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    blocks: FarBlocks,
    first: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the share of the far keys at hand in dq, dk and dv, in the accumulator's dtype.

    dout        (S, H, D)
    lse, delta  (H, S): the logsumexp over all keys, and rowsum(out * dout), in that dtype

    Other arguments are those of `far_outputs`. Formulas are those of `Kernel.backward`.
    """
    wide, groups = lse.dtype, k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    heads = q.shape[1] // groups
    for group in range(groups):
        of_group = slice(group * heads, (group + 1) * heads)
        for tile in _tiles(blocks, group, first, len(k)):
            rows, drows = (x[tile.queries, of_group].to(wide).transpose(0, 1) for x in (q, dout))
            keys, values = (x[tile.keys, group].to(wide) for x in (k, v))
            row_lse, row_delta = (x[of_group, tile.queries].unsqueeze(-1) for x in (lse, delta))
            probs = (_scores(rows, keys, tile, scale) - row_lse).exp()
            probs = probs.masked_fill(~tile.visible, 0.0)
            dscores = probs * (drows @ values.mT - row_delta) * scale
            dq[tile.queries, of_group] = (dscores @ keys).transpose(0, 1)
            # A key is twice in a tile where a document's last block reaches into the next
            # document. Its second share is 0, so the sums do not depend on the order.
            dk[:, group].index_add_(0, tile.keys, (dscores.mT @ rows).sum(0))
            dv[:, group].index_add_(0, tile.keys, (probs.mT @ drows).sum(0))
    return dq, dk, dv


def _scores(rows: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Return the scores of the queries of a kv head: (heads, S, U), -inf for hidden pairs."""
    return (rows @ keys.mT * scale).masked_fill(~tile.visible, -math.inf)


def _tiles(blocks: FarBlocks, group: int, first: int, count: int) -> Iterator[_Tile]:
    """Yield the tiles of a kv head in which some of the `count` keys from `first` on are far."""
    for start in range(0, len(blocks.starts), _QUERIES):
        queries = slice(start, start + _QUERIES)
        starts = blocks.starts[queries, group]
        at_hand = (starts >= 0) & (starts + blocks.block_size > first) & (starts < first + count)
        if not at_hand.any():
            continue
        union = starts[at_hand].unique()
        chosen = ((starts.unsqueeze(-1) == union) & at_hand.unsqueeze(-1)).any(1)
        tokens = union.unsqueeze(1) + torch.arange(blocks.block_size, device=starts.device)
        inside = (tokens >= first) & (tokens < first + count)
        before = tokens < blocks.stops[queries].view(-1, 1, 1)
        visible = chosen.unsqueeze(-1) & before
        yield _Tile(queries, tokens[inside] - first, visible[:, inside])
