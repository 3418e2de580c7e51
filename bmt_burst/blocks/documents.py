"""Causal documents, in which data chooses what queries attend to."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..sequence.mask import Mask, Slice
from ..sequence.span import Span, length

MOST_TOKENS = 1 << 26  # of a sequence. Kernels sort 32-bit numbers, and 5 bits are a query


def documents(mask: Mask) -> list[Span]:
    """Return the documents of a mask, as spans of the keys. Other tokens see nothing."""
    return [s.kv for s in mask.slices]


def own_keys(queries: Tensor, mask: Mask) -> Tensor:
    """Return the positions of rising queries (S,) among the keys: (S,) int64, rising.

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


@functools.lru_cache(maxsize=64)  # each call asks, and a mask may have thousands of slices
def find_fault(mask: Mask) -> str | None:
    """Return why sparse attention cannot use this mask, or None if it can."""
    if mask.kv_len > MOST_TOKENS:
        return f"sparse attention takes up to {MOST_TOKENS} tokens, got {mask.kv_len}"
    end = 0
    for s in mask.slices:
        (start, stop), low = s.kv, s.low
        if mask.seq_len == mask.kv_len:
            fits = s.q == s.kv and low == 0
        else:  # queries are tokens of the keys, which begin at `end` or later
            fits = low is not None and end <= start <= s.q[0] - low and s.q[1] - low <= stop
        if not fits or s.high is not None:
            return (
                "sparse attention needs causal documents, whole sequences or Mask.documents("
                f"..., causal=True); got a mask with Slice{tuple(s)}"
            )
        end = stop
    return None
