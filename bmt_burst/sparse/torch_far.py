"""The far part of sparse attention by torch operators, for any device and dtype.

A tile of queries loads the union of their blocks once, and hides from each query what it did not
choose. The larger the union, the fewer queries are in a tile, so that its scores stay small.

Letters: S queries, H query heads, G kv heads, D head size, U keys of a union, T keys at hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import FarBlocks, FarKeys

_QUERIES = 64  # of a tile at most
_SCORES = 1 << 22  # of a tile at most, over the heads, unless it has one query


@dataclass(frozen=True)
class _Tile:
    """Some queries, and the keys that at least one of them attends to.

    queries  the indices of the queries
    keys     (U,) int64: the indices of the keys at hand
    visible  (S, U) bool: the pairs of the far part
    """

    queries: slice
    keys: Tensor
    visible: Tensor


def add_far_outputs(q: Tensor, far: FarKeys, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the far keys among those at hand into out and lse, in place.

    q    (S, H, D)
    out  (S, H, D) in q's dtype or the accumulator's: the output so far
    lse  (H, S), natural log, in the accumulator's dtype. It is -inf where nothing was seen so far
    """
    k, v, blocks, first, scale = far
    wide, groups = lse.dtype, k.shape[1]
    heads = q.shape[1] // groups
    for group in range(groups):
        of_group = slice(group * heads, (group + 1) * heads)
        for tile in _tiles(blocks, group, first, len(k), heads):
            rows = q[tile.queries, of_group].to(wide).transpose(0, 1)
            scores = _scores(rows, k[tile.keys, group].to(wide), tile, scale)
            before, part = lse[of_group, tile.queries], scores.logsumexp(-1)
            total = torch.logaddexp(before, part)
            sure = total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)
            added = (scores - sure).exp() @ v[tile.keys, group].to(wide)
            # A row that sees nothing stays.
            kept = (before - sure.squeeze(-1)).exp().masked_fill(total == -math.inf, 1.0)
            old = out[tile.queries, of_group].transpose(0, 1).to(wide)
            new = old * kept.unsqueeze(-1) + added
            out[tile.queries, of_group] = new.transpose(0, 1).to(out.dtype)
            lse[of_group, tile.queries] = total


def add_far_gradients(
    dout: Tensor, q: Tensor, far: FarKeys, lse_delta: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the share of the far keys at hand to dq. Return their dk and dv, in the accumulator's
    dtype.

    dout, q    (S, H, D)
    lse_delta  (S, H, 2), contiguous, in that dtype: the logsumexp over all keys, and rowsum(out *
               dout)
    dq         (S, H, D) in that dtype

    Formulas are those of `Kernel.backward`.
    """
    k, v, blocks, first, scale = far
    wide, groups = lse_delta.dtype, k.shape[1]
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    heads = q.shape[1] // groups
    for group in range(groups):
        of_group = slice(group * heads, (group + 1) * heads)
        for tile in _tiles(blocks, group, first, len(k), heads):
            rows, drows = (x[tile.queries, of_group].to(wide).transpose(0, 1) for x in (q, dout))
            keys, values = (x[tile.keys, group].to(wide) for x in (k, v))
            lse, delta = lse_delta[tile.queries, of_group].transpose(0, 1).unsqueeze(2).unbind(-1)
            probs = (_scores(rows, keys, tile, scale) - lse).exp()
            probs = probs.masked_fill(~tile.visible, 0.0)
            dscores = probs * (drows @ values.mT - delta) * scale
            dq[tile.queries, of_group] += (dscores @ keys).transpose(0, 1)
            # A key is twice in a tile where a document's last block reaches into the next
            # document. Its second share is 0, so the sums do not depend on the order.
            dk[:, group].index_add_(0, tile.keys, (dscores.mT @ rows).sum(0))
            dv[:, group].index_add_(0, tile.keys, (probs.mT @ drows).sum(0))
    return dk, dv


def _scores(rows: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Return the scores of the queries of a kv head: (heads, S, U), -inf for hidden pairs."""
    return (rows @ keys.mT * scale).masked_fill(~tile.visible, -math.inf)


def _tiles(blocks: FarBlocks, group: int, first: int, count: int, heads: int) -> Iterator[_Tile]:
    """Yield the tiles of a kv head in which some of the `count` keys from `first` on are far.

    heads  the query heads of the kv head
    """
    waiting = [
        slice(start, min(start + _QUERIES, len(blocks.starts)))
        for start in range(0, len(blocks.starts), _QUERIES)
    ]
    while waiting:
        queries = waiting.pop(0)
        starts = blocks.starts[queries, group]
        at_hand = (starts >= 0) & (starts + blocks.block_size > first) & (starts < first + count)
        union = starts[at_hand].unique()
        if not len(union):
            continue
        size = len(starts)
        if size > 1 and heads * size * len(union) * blocks.block_size > _SCORES:
            middle = queries.start + size // 2
            waiting[:0] = slice(queries.start, middle), slice(middle, queries.stop)
            continue
        chosen = ((starts.unsqueeze(-1) == union) & at_hand.unsqueeze(-1)).any(1)
        tokens = union.unsqueeze(1) + torch.arange(blocks.block_size, device=starts.device)
        inside = (tokens >= first) & (tokens < first + count)
        before = tokens < blocks.stops[queries].view(-1, 1, 1)
        visible = chosen.unsqueeze(-1) & before
        yield _Tile(queries, tokens[inside] - first, visible[:, inside])
