"""Parts: partial results of some tokens, as kernels made them, and their sums in plain torch. These
serve CPUs and fp64, and specify `bmt_burst.merging.fused`.

A part has the tokens of rising spans. In its tensors these tokens lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.span import Span, hull, in_turn, length, overlap, shifted

# The tokens, and their gradient (B, T, H, D).
GradientPart = tuple[Sequence[Span], Tensor]
# The queries, and their out (B, T, H, D) and lse (B, H, T).
OutputPart = tuple[Sequence[Span], Tensor, Tensor]
Parts = Sequence[GradientPart] | Sequence[OutputPart]
# N results of the same few queries: out (N, B, S, H, D) and lse (N, B, S, H), natural log, in the
# accumulator's dtype.
Partials = tuple[Tensor, Tensor]


def tokens_at(x: Tensor, span: Span) -> Tensor:
    """Return a view of tokens span[0]..span[1] - 1 of x (B, S, ...), x itself for all tokens."""
    return x if span == (0, x.shape[1]) else x[:, slice(*span)]


def is_whole(parts: Parts, tokens: int) -> bool:
    """Whether there is one part, and it has all tokens."""
    return len(parts) == 1 and [*parts[0][0]] == [(0, tokens)]


def lies_in(part: GradientPart | OutputPart, total: Tensor) -> bool:
    """Whether a part has all tokens and already lies in the memory of the sum."""
    if [*part[0]] != [(0, total.shape[1])]:
        return False
    return part[1].data_ptr() == total.data_ptr() and part[1].dtype == total.dtype


def find_unfinished(parts: Parts, total: Tensor) -> Span | None:
    """Return the tokens of the sum that still have to be written, or None if there are none.

    If the first part lies in `total`, only the tokens that later parts have change.
    """
    if not lies_in(parts[0], total):
        return 0, total.shape[1]
    return hull(span for part in parts[1:] for span in part[0]) if len(parts) > 1 else None


def clip_parts(parts: Parts, within: Span) -> list[Any]:
    """Return the tokens of parts that are in `within`, counted from its start."""
    clipped = []
    for spans, x, *lse in parts:
        found = [  # where they are, and where they lie in the part's tensors
            (shifted(at, -within[0]), shifted(at, place[0] - span[0]))
            for span, place in in_turn(spans)
            if length(at := overlap(span, within))
        ]
        if found:
            place = found[0][1][0], found[-1][1][1]
            rows = (each[:, :, slice(*place)] for each in lse)
            clipped.append(([at for at, _ in found], tokens_at(x, place), *rows))
    return clipped


def merge_outputs(out: Tensor, lse: Tensor, parts: list[OutputPart]) -> None:
    """Fill out (B, S, H, D) and lse (B, H, S) with the merge of `parts`, at least one.

    `out` may be the memory of a whole first part. Then only tokens that later parts have are
    written, and `lse` is a copy of that part's.
    """
    if not (span := find_unfinished(parts, out)):
        return
    out, parts = tokens_at(out, span), clip_parts(parts, span)
    total, total_lse = torch.zeros_like(out, dtype=lse.dtype), by_token(lse[:, :, slice(*span)])
    total_lse.fill_(-torch.inf)
    for spans, part, part_lse in parts:
        for span, place in in_turn(spans):
            rows, row_lse = tokens_at(total, span), tokens_at(total_lse, span)
            more, more_lse = (tokens_at(x, place).to(lse.dtype) for x in (part, by_token(part_lse)))
            rows.copy_(_weigh(rows, row_lse, more_lse) + _weigh(more, more_lse, row_lse))
            row_lse.copy_(torch.logaddexp(row_lse, more_lse))
    out.copy_(total)


def sum_gradients(total: Tensor, parts: list[GradientPart]) -> None:
    """Fill total (B, S, H, D) with the sum of `parts`, as `merge_outputs` does."""
    if not (span := find_unfinished(parts, total)):
        return
    total, parts = tokens_at(total, span), clip_parts(parts, span)
    wide = torch.zeros_like(total, dtype=accumulator_dtype(total.dtype))
    for spans, part in parts:
        for span, place in in_turn(spans):
            tokens_at(wide, span).add_(tokens_at(part, place))
    total.copy_(wide)


def fill_lse_delta(rows: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> None:
    """Fill the first columns of rows (B, S, H, 2 or more), contiguous, with lse (B, H, S) and
    rowsum(out * dout), both (B, S, H, D).
    """
    rows[..., 0] = lse.transpose(1, 2)
    rows[..., 1] = (out.to(rows.dtype) * dout).sum(-1)


def _weigh(out: Tensor, lse: Tensor, other: Tensor) -> Tensor:
    """Return the share of out (B, S, H, D) with `lse` (B, S, H, 1) in a merge with lse `other`.

    It is out if neither side saw anything. It is 0, even for NaN, if only this side saw nothing.
    """
    nothing = lse == -torch.inf
    share = torch.sigmoid(lse - other).masked_fill_(nothing, 1.0)  # -inf - -inf would be NaN
    return (out * share).masked_fill_(nothing & (other != -torch.inf), 0.0)


def by_token(x: Tensor) -> Tensor:
    """Return a view (B, S, H, 1) of x (B, H, S)."""
    return x.transpose(1, 2).unsqueeze(-1)
