"""Parts: partial results of some tokens, as kernels made them.

A part has the tokens of rising spans. In its tensors these tokens lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..sequence.span import Span, hull, in_turn, length, overlap, shifted

# The tokens, and their gradient (B, T, H, D).
Part = tuple[Sequence[Span], Tensor]
# The queries, and their out (B, T, H, D) and lse (B, H, T).
OutputPart = tuple[Sequence[Span], Tensor, Tensor]
Parts = Sequence[Part] | Sequence[OutputPart]
# N results of the same few queries: out (N, B, S, H, D) and lse (N, B, S, H), natural log, in the
# accumulator's dtype.
Partials = tuple[Tensor, Tensor]


def tokens_at(x: Tensor, span: Span) -> Tensor:
    """Return a view of tokens span[0]..span[1] - 1 of x (B, S, ...), x itself for all tokens."""
    return x if span == (0, x.shape[1]) else x[:, slice(*span)]


def is_whole(parts: Parts, tokens: int) -> bool:
    """Whether there is one part, and it has all tokens."""
    return len(parts) == 1 and [*parts[0][0]] == [(0, tokens)]


def lies_in(part: Part | OutputPart, total: Tensor) -> bool:
    """Whether a part has all tokens and already lies in the memory of the sum."""
    if [*part[0]] != [(0, total.shape[1])]:
        return False
    return part[1].data_ptr() == total.data_ptr() and part[1].dtype == total.dtype


def find_unfinished(parts: Parts, total: Tensor) -> Span | None:
    """Return the tokens of the sum that still have to be written, or None if there are none.

    If the first part lies in `total`, the other tokens have their sum already, and only those that
    later parts have change.
    """
    if not lies_in(parts[0], total):
        return 0, total.shape[1]
    return hull(span for part in parts[1:] for span in part[0]) if len(parts) > 1 else None


def clip_parts(parts: Parts, within: Span) -> list[Any]:
    """Return the tokens of parts that are in `within`, counted from its start."""
    clipped = []
    for spans, x, *lse in parts:
        if found := _clip_spans(spans, within):
            of_lse = (rows[:, :, slice(*found[1])] for rows in lse)
            clipped.append((found[0], tokens_at(x, found[1]), *of_lse))
    return clipped


def _clip_spans(spans: Sequence[Span], within: Span) -> tuple[list[Span], Span] | None:
    """Return the part of `spans` in `within`, counted from its start, and where it lies in the
    part's tensors. Return None if nothing is in it.
    """
    found = [
        (at, shifted(at, place[0] - span[0]))
        for span, place in in_turn(spans)
        if length(at := overlap(span, within))
    ]
    if not found:
        return None
    (_, (start, _)), (_, (_, stop)) = found[0], found[-1]
    return [shifted(at, -within[0]) for at, _ in found], (start, stop)
