"""The far blocks: the chosen ones that begin before a query's window.

Letters: S tokens, F of them that choose, G kv heads, D head size, N chosen blocks, T keys at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class FarBlocks:
    """The far blocks of some of the tokens at hand, as places in a sequence.

    starts      (F, G or H, N) int32: the first tokens of the blocks. Entries that are no block are
                -1.
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
