"""Causal documents, in which data chooses what queries attend to.

Letters: S tokens of a rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..sequence.mask import Mask, Slice
from ..sequence.span import Span, length


def documents(mask: Mask) -> list[Span]:
    """Return the documents of a mask, as spans of the keys. Other tokens see nothing."""
    return [s.kv for s in mask.slices]


def own_keys(queries: Tensor, mask: Mask) -> Tensor:
    """Return the positions of rising queries among the keys: (S,) int64, rising.

    Each query is a token of its document's keys: its own position if all keys have queries.
    """
    if not mask.slices:
        return queries
    starts = torch.tensor([s.q[0] for s in mask.slices])
    shifts = torch.tensor([-find_low(s) for s in mask.slices])
    nearest = torch.searchsorted(starts, queries, right=True).sub(1).clamp_min(0)
    return queries + shifts[nearest]


def find_low(s: Slice) -> int:
    """Return by how much the positions of a document's queries exceed those of the same keys."""
    assert s.low is not None, "the mask is of causal documents"
    return s.low


def find_longest(mask: Mask) -> int:
    """Return the number of tokens of the longest document."""
    return max(map(length, documents(mask)), default=0)
