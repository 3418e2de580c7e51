"""The far part of sparse attention by torch operators, for any device and dtype.

`far.py` specifies it.

A tile of queries loads the union of their blocks once, and hides from each query what it did not
choose.

Letters: S queries, H query heads, G kv heads, D head size, U keys of a union, T keys at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from .blocks import FarBlocks

_QUERIES = 64  # of a tile


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
    """Compute what `far.far_outputs` does."""
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
    """Compute what `far.far_gradients` does."""
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
