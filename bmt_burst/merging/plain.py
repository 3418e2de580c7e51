"""Sums in plain torch, for CPUs and fp64. They specify `bmt_burst.merging.fused`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.span import in_turn
from .parts import OutputPart, Part, clip_parts, find_unfinished, tokens_at


def merge_outputs(out: Tensor, lse: Tensor, parts: list[OutputPart]) -> None:
    """Fill out (B, S, H, D) and lse (B, H, S) with the merge of `parts`, at least one.

    `out` may be the memory of the first part if that is whole. Then only tokens that later parts
    have are written. `lse` may not be that part's memory, but then it holds the same numbers.
    """
    if not (span := find_unfinished(parts, out)):
        return
    out, lse, parts = tokens_at(out, span), lse[:, :, slice(*span)], clip_parts(parts, span)
    total = torch.zeros_like(out, dtype=lse.dtype)
    lse.fill_(-torch.inf)
    for spans, part, part_lse in parts:
        for span, place in in_turn(spans):
            rows, row_lse = tokens_at(total, span), lse[:, :, slice(*span)]
            more = tokens_at(part, place).to(lse.dtype)
            more_lse = part_lse[:, :, slice(*place)].to(lse.dtype)
            rows.copy_(_weigh(rows, row_lse, more_lse) + _weigh(more, more_lse, row_lse))
            row_lse.copy_(torch.logaddexp(row_lse, more_lse))
    out.copy_(total)


def sum_gradients(total: Tensor, parts: list[Part]) -> None:
    """Fill total (B, S, H, D) with the sum of `parts`, at least one.

    It may be the memory of the first part if that is whole. Then only tokens that later parts have
    are written.
    """
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
    """Return the share of out (B, S, H, D) with `lse` (B, H, S) in its merge with a side of lse
    `other`.

    It is all of out if neither side saw anything. It is 0, even for NaN, if only this side saw
    nothing.
    """
    nothing = lse == -torch.inf
    share = torch.sigmoid(lse - other).masked_fill_(nothing, 1.0)  # -inf - -inf would be NaN
    skipped = nothing & (other != -torch.inf)
    return (out * _by_row(share)).masked_fill_(_by_row(skipped), 0.0)


def _by_row(x: Tensor) -> Tensor:
    """Shape x (B, H, S) so that it broadcasts with (B, S, H, D)."""
    return x.transpose(1, 2).unsqueeze(-1)
