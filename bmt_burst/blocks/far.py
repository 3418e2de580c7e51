"""The far blocks of queries, and attention to them by torch operators, for any device and dtype. It
specifies `triton_far.py`.

The far part of a query are the keys of its blocks before its window, which a dense kernel computes.
So each pair is in one part, and partial outputs merge by lse. The keys at hand may be a part of the
sequence. Blocks outside are left out, so parts add up.

Neighbouring queries choose nearly the same blocks. A tile of queries loads the union of their
blocks once, and hides from each query what it did not choose. The larger the union, the fewer
queries are in a tile, so that its scores stay small.

Letters: S tokens, F of them that choose, H query heads, G kv heads, D head size, N chosen blocks, U
keys of a union, T keys at hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_QUERIES = 64  # of a tile at most
_SCORES = 1 << 22  # of a tile at most, over the heads, unless it has one query


@dataclass(frozen=True)
class FarBlocks:
    """The far blocks of some of the tokens at hand, as places in a sequence.

    starts      (F, G or H, N) int32: the first tokens of the blocks, -1 where there is none
    queries     (F,) int64, rising: which tokens have these blocks
    stops       (S,) int64: where the far part of each token ends, so the first one of its window
    block_size  tokens of a block
    tokens      of the sequence
    documents   (F,) int64: where the document of each query starts
    """

    starts: Tensor
    queries: Tensor
    stops: Tensor
    block_size: int
    tokens: int
    documents: Tensor
    # what kernels keep for these blocks
    prepared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of_choice(
        chosen: Tensor, starts: Tensor, queries: Tensor, stops: Tensor, block_size: int, tokens: int
    ) -> FarBlocks:
        """Return the blocks before `stops` among those that were chosen.

        chosen  (F, G or H, N) int32, from the start of the query's document
        starts  (F,) int64: where the query's document starts in the sequence
        """
        first = starts.int().view(-1, 1, 1) + chosen * block_size
        is_far = (chosen >= 0) & (first < stops[queries].view(-1, 1, 1))
        found = first.masked_fill(~is_far, -1)
        return FarBlocks(found, queries, stops, block_size, tokens, starts)


class FarKeys(NamedTuple):
    """The keys at hand, as some queries attend to them.

    k, v    (T, G, D): tokens first .. first + T - 1 of the sequence
    blocks  the far blocks
    scale   the factor of the scores
    """

    k: Tensor
    v: Tensor
    blocks: FarBlocks
    first: int
    scale: float


def packed_dtype(most: int) -> torch.dtype:
    """Return the dtype in which numbers of up to `most` blocks, and -1, are kept."""
    return torch.int16 if most <= 1 << 15 else torch.int32


@dataclass(frozen=True)
class _Tile:
    """Some queries, and the keys that at least one of them attends to.

    group    their kv head
    heads    its query heads
    queries  (F,) int64: which tokens they are
    keys     (U,) int64: the indices of the keys at hand
    visible  (F, U) bool: the pairs of the far part
    """

    group: int
    heads: slice
    queries: Tensor
    keys: Tensor
    visible: Tensor


def add_far_outputs(q: Tensor, far: FarKeys, out: Tensor, lse: Tensor) -> None:
    """Merge attention to the far keys among those at hand into out and lse, in place.

    q    (S, H, D)
    out  (S, H, D) in q's dtype or the accumulator's: the output so far
    lse  (H, S), natural log, in the accumulator's dtype. It is -inf where nothing was seen so far
    """
    wide = lse.dtype
    for tile in _tiles(q, far):
        here = tile.queries, tile.heads
        keys, values = (x[tile.keys, tile.group].to(wide) for x in (far.k, far.v))
        scores = _scores(q[here].to(wide).transpose(0, 1), keys, tile, far.scale)
        before, part = lse[tile.heads, tile.queries], scores.logsumexp(-1)
        total = torch.logaddexp(before, part)
        sure = total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)
        added = (scores - sure).exp() @ values
        # A row that sees nothing stays.
        kept = (before - sure.squeeze(-1)).exp().masked_fill(total == -math.inf, 1.0)
        new = out[here].transpose(0, 1).to(wide) * kept.unsqueeze(-1) + added
        out[here] = new.transpose(0, 1).to(out.dtype)
        lse[tile.heads, tile.queries] = total


def add_far_gradients(
    dout: Tensor, q: Tensor, far: FarKeys, lse_delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Add the shares of the far keys at hand to dq, dk and dv, in place.

    dout, q    (S, H, D)
    lse_delta  (S, H, 2), contiguous, in that dtype: the logsumexp over all keys, and rowsum(out *
               dout)
    dq         (S, H, D) in q's dtype or that one
    dk, dv     (T, G, D) in that one

    Formulas are those of `Kernel.backward`.
    """
    wide = lse_delta.dtype
    for tile in _tiles(q, far):
        here = tile.queries, tile.heads
        rows, drows = (x[here].to(wide).transpose(0, 1) for x in (q, dout))
        keys, values = (x[tile.keys, tile.group].to(wide) for x in (far.k, far.v))
        lse, delta = lse_delta[here].transpose(0, 1).unsqueeze(2).unbind(-1)
        probs = (_scores(rows, keys, tile, far.scale) - lse).exp()
        probs = probs.masked_fill(~tile.visible, 0.0)
        dscores = probs * (drows @ values.mT - delta) * far.scale
        total = dq[here].to(wide) + (dscores @ keys).transpose(0, 1)
        dq[here] = total.to(dq.dtype)
        # A key is twice in a tile where a document's last block reaches into the next document. Its
        # second share is 0, so the sums do not depend on the order.
        dk[:, tile.group].index_add_(0, tile.keys, (dscores.mT @ rows).sum(0))
        dv[:, tile.group].index_add_(0, tile.keys, (probs.mT @ drows).sum(0))


def _scores(rows: Tensor, keys: Tensor, tile: _Tile, scale: float) -> Tensor:
    """Return the scores of the queries of a kv head: (heads, F, U), -inf for hidden pairs."""
    return (rows @ keys.mT * scale).masked_fill(~tile.visible, -math.inf)


def _tiles(q: Tensor, far: FarKeys) -> Iterator[_Tile]:
    """Yield the tiles in which some of the keys at hand are far, by kv heads."""
    blocks, first, (count, groups, _) = far.blocks, far.first, far.k.shape
    choices = blocks.starts.shape[1]  # one for each kv head, or for each query head
    heads = q.shape[1] // choices
    # A tile has queries of one document: NaN times 0 is NaN.
    counts = blocks.documents.unique_consecutive(return_counts=True)[1].tolist()
    waiting = [
        (choice, slice(start, min(start + _QUERIES, stop)))
        for choice in range(choices)
        for first_query, stop in itertools.pairwise(itertools.accumulate(counts, initial=0))
        for start in range(first_query, stop, _QUERIES)
    ]
    while waiting:
        choice, some = waiting.pop(0)
        starts, queries = blocks.starts[some, choice], blocks.queries[some]
        at_hand = (starts >= 0) & (starts + blocks.block_size > first) & (starts < first + count)
        union = starts[at_hand].unique()
        if not len(union):
            continue
        size = len(starts)
        if size > 1 and heads * size * len(union) * blocks.block_size > _SCORES:
            middle = some.start + size // 2
            halves = slice(some.start, middle), slice(middle, some.stop)
            waiting[:0] = [(choice, half) for half in halves]
            continue
        chosen = ((starts.unsqueeze(-1) == union) & at_hand.unsqueeze(-1)).any(1)
        tokens = union.unsqueeze(1) + torch.arange(blocks.block_size, device=starts.device)
        inside = (tokens >= first) & (tokens < first + count)
        before = tokens < blocks.stops[queries].view(-1, 1, 1)
        visible = chosen.unsqueeze(-1) & before
        group, of_choice = choice * groups // choices, slice(choice * heads, (choice + 1) * heads)
        yield _Tile(group, of_choice, queries, tokens[inside] - first, visible[:, inside])
