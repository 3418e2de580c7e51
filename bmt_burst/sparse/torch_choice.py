"""The choice of blocks by torch operators, for any device and dtype. `choice.py` defines it.

Scores are computed in tiles of one shape, so that a choice does not depend on the other queries.

Letters: T queries, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .compressed import CompressedKeys
from .config import Constants
from .queries import Choosers

_QUERIES = 64  # of a tile of scores
_KERNELS = 512  # of a tile of scores
_ALIGNED = 16  # a tile's head size is a multiple of this


def choose_by_score(
    q: Tensor, choosers: Choosers, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Do what `choice.choose_by_score` does."""
    found = [q.new_empty(0, keys.scored.shape[1], sparse.most_blocks, dtype=torch.int32)]
    for _, (a, b), strides in choosers.documents:
        of_document = q[choosers.tokens[a:b].to(q.device)]
        places = choosers.places[a:b]
        found.append(_choose(of_document, places, keys.of_document(strides), sparse, scale))
    return torch.cat(found)


def _choose(
    q: Tensor, places: Tensor, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Return the chosen blocks of queries (T, H, D) at some places (T,) of a document."""
    wide, lacking = q.to(keys.scored.dtype) * scale, -len(q) % _QUERIES
    padded = functional.pad(wide, (0, -q.shape[-1] % _ALIGNED, 0, 0, 0, lacking))
    # A query of the padding sees nothing.
    places = functional.pad(places.to(q.device), (0, lacking), value=-1)
    found = []
    for group, of_group in enumerate(padded.chunk(keys.scored.shape[1], 1)):
        columns = CompressedKeys(*(_lay_out(x[:, group]) for x in keys))
        tiles = zip(of_group.split(_QUERIES), places.split(_QUERIES), strict=True)
        scores = (_score_blocks(*tile, columns, sparse) for tile in tiles)
        found.append(torch.cat([_take_largest(x, sparse.most_blocks) for x in scores]))
    return torch.stack(found, 1)[: len(q)]


def _score_blocks(q: Tensor, places: Tensor, columns: CompressedKeys, sparse: Constants) -> Tensor:
    """Return A of a tile of queries (64, heads, D) of a kv head: (64, blocks), -inf for blocks that
    begin after the query, inf for those that are always chosen.

    q        scaled
    columns  the compressed keys of the kv head as `_lay_out` returns them
    """
    stride, last = sparse.kernel_stride, int(places.max())
    normalizer = q.new_full(q.shape[:2], -math.inf)
    for kernels, scores in _score(q, columns.normalizing, last, 4 * stride, 8 * stride):
        hidden = kernels > places.unsqueeze(1)
        scores = scores.masked_fill(hidden.unsqueeze(1), -math.inf)
        normalizer = torch.logaddexp(normalizer, scores.logsumexp(-1))
    normalizer = normalizer.masked_fill(normalizer == -math.inf, 0.0)
    sums = [q.new_empty(len(q), 0)]
    for kernels, scores in _score(q, columns.scored, last, stride, 2 * stride):
        total = (scores - normalizer.unsqueeze(-1)).exp().sum(1)
        sums.append(total.masked_fill(kernels > places.unsqueeze(1), -1.0))
    return _find_largest(torch.cat(sums, 1), places, last // sparse.block_size + 1, sparse)


def _find_largest(sums: Tensor, places: Tensor, blocks: int, sparse: Constants) -> Tensor:
    """Return A from the sums S (64, kernels), which are -1 for kernels that are not visible."""
    each = sparse.block_size // sparse.kernel_stride
    lacking = blocks * each - sums.shape[1]
    sums = functional.pad(sums.nan_to_num(-1.0), (1, lacking), value=-1.0)
    largest = sums.unfold(1, each + 1, each).amax(-1)
    block = torch.arange(blocks, device=sums.device)
    own = (places // sparse.block_size).unsqueeze(1)
    always = (block < sparse.init_blocks) | (block >= own - sparse.window_blocks)
    return largest.masked_fill(always, math.inf).masked_fill(block > own, -math.inf)


def _lay_out(keys: Tensor) -> Tensor:
    """Return compressed keys (n, D) as columns, padded to tiles of one shape: (D, kernels)."""
    lacking = 0, -len(keys) % _KERNELS, 0, -keys.shape[1] % _ALIGNED
    return functional.pad(keys.T, lacking).contiguous()


def _score(
    q: Tensor, keys: Tensor, last: int, stride: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of a tile of queries (64, heads, D) and each tile of kernels that is visible
    at place `last`: the last tokens of the kernels (512,), and the scores (64, heads, 512).
    """
    rows = q.flatten(0, 1)
    for start in range(0, keys.shape[1], _KERNELS):
        if start * stride + size - 1 > last:
            return
        ends = torch.arange(start, start + _KERNELS, device=q.device) * stride + size - 1
        columns = keys[:, start : start + _KERNELS].contiguous()
        yield ends, (rows @ columns).unflatten(0, q.shape[:2])


def _take_largest(scores: Tensor, most: int) -> Tensor:
    """Return the `most` blocks with the largest scores (T, blocks), the lower of equal ones: rising
    int32, then -1. A score of -inf is never taken.
    """
    blocks = scores.shape[1]
    values, order = scores.sort(dim=1, descending=True, stable=True)
    taken = order[:, :most].masked_fill(values[:, :most] == -math.inf, blocks)
    taken = functional.pad(taken, (0, max(most - blocks, 0)), value=blocks).sort(1).values
    return taken.masked_fill(taken == blocks, -1).int()
