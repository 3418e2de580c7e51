"""Triton kernels that add up in one pass: `bmt_burst.merging.merge` has their specification."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.compiled import multiply_by_16
from ..kernels.packed import current_stream, send_to_device
from ..sequence.span import Span, length
from .merge import OutputPart, Part, lies_in

_BLOCK = 2048  # entries that a program handles


def merge_outputs(out: Tensor, lse: Tensor, parts: list[OutputPart]) -> None:
    """Fills out (B, S, H, D) and lse (B, H, S) with the merge of `parts`: (spans, out (B, T, H, D),
    lse (B, H, T)).

    All may be of any strides. Out may be the first part's, whole; lse may not, but holds the same
    numbers then.
    """
    grid, sizes, constants = _by_rows(out)
    constants["IN_PLACE"] = bool(parts) and lies_in(parts[0], out)
    outs, lses = [_dense_rows(part) for _, part, _ in parts], [part_lse for _, _, part_lse in parts]
    _merge_outputs[grid](
        out,
        lse,
        out.stride(),
        multiply_by_16(lse.stride()),
        tuple(outs),
        tuple(part.stride(0) for part in outs),
        tuple(part.stride(1) for part in outs),
        tuple(part.stride(2) for part in outs),
        # where memory begins, at multiples of 16 too
        tuple(part_lse.as_strided((1,), (1,), 0) for part_lse in lses),
        multiply_by_16(part_lse.storage_offset() for part_lse in lses),
        multiply_by_16(part_lse.stride(0) for part_lse in lses),
        multiply_by_16(part_lse.stride(1) for part_lse in lses),
        multiply_by_16(part_lse.stride(2) for part_lse in lses),
        _places(parts, out),
        *sizes,
        PARTS=len(parts),
        **constants,
    )


def sum_gradients(total: Tensor, parts: list[Part]) -> None:
    """Fills total (B, S, H, D) with the sum of `parts`: (spans, gradient (B, T, H, D)). It may be
    the first, whole.

    All may be of any strides.
    """
    grid, sizes, constants = _by_rows(total)
    constants["IN_PLACE"] = bool(parts) and lies_in(parts[0], total)
    grads = [_dense_rows(part) for _, part in parts]
    _sum_gradients[grid](
        total,
        total.stride(),
        tuple(grads),
        tuple(part.stride(0) for part in grads),
        tuple(part.stride(1) for part in grads),
        tuple(part.stride(2) for part in grads),
        _places(parts, total),
        *sizes,
        PARTS=len(parts),
        **constants,
    )


def fill_lse_delta(rows: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> None:
    """Fills rows (B, S, H, 2) with lse (B, H, S) and rowsum(out * dout) of out, dout (B, S, H, D)
    of any strides.
    """
    grid, sizes, constants = _by_rows(out)
    strides = out.stride(), dout.stride(), multiply_by_16(lse.stride())
    _fill_lse_delta[grid](rows, out, dout, lse, *strides, *sizes, **constants)


def _places(parts: Sequence[tuple], total: Tensor) -> tuple[tuple, ...]:
    """Which tokens parts have: (starts, stops) `multiply_by_16` where each is of one span, else
    (maps,).
    """
    if all(len(spans) == 1 for spans, *_ in parts):
        return tuple(multiply_by_16(spans[0][end] for spans, *_ in parts) for end in (0, 1))
    device = total.device
    return (
        tuple(
            _map(tuple(spans), total.shape[1], device, current_stream(device))
            for spans, *_ in parts
        ),
    )


@functools.lru_cache(maxsize=128)
def _map(
    spans: tuple[Span, ...], tokens: int, device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """(tokens,) int32, for work on `stream`: where tokens are in a part of rising spans, -1 where
    they are not.
    """
    places, (starts, stops) = (
        torch.full((tokens,), -1, dtype=torch.int32),
        torch.tensor(spans).unbind(1),
    )
    counts = stops - starts
    place = torch.arange(sum(map(length, spans)), dtype=torch.int32)
    places[place + (starts - counts.cumsum(0) + counts).repeat_interleave(counts)] = place
    return send_to_device(places, device)


def _dense_rows(x: Tensor) -> Tensor:
    """x (B, T, H, D) with each row of D entries in one piece."""
    return x if x.stride(3) == 1 else x.contiguous()


def _by_rows(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], dict[str, int]]:
    """Programs that take some of the S * H rows of x (B, S, H, D) each: the grid, (S, H, D), rows
    and their width.
    """
    batch, tokens, heads, head_size = x.shape
    width = triton.next_power_of_2(head_size)
    rows = max(1, _BLOCK // width)
    return (
        (triton.cdiv(tokens * heads, rows), batch),
        (tokens, heads, head_size),
        {"ROWS": rows, "WIDTH": width},
    )


# Spans and lengths differ from call to call; those in tuples, and strides of lse, come
# `multiply_by_16`.
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["lse"])
def _merge_outputs(
    out, lse, out_strides, lse_strides,
    parts, batch_strides, token_strides, head_strides,
    part_lses, lse_offsets, lse_batch_strides, lse_head_strides, lse_token_strides,
    places, tokens, heads, head_size,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token * heads + head
    batch = tl.program_id(1).to(tl.int64)
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = row < tokens * heads
    if IN_PLACE:
        inside &= _more_came(token, inside, places, PARTS)

    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, inside, places, i)
        strides = lse_batch_strides[i], lse_head_strides[i], lse_token_strides[i]
        at = _row_at(batch, head, at_token, strides) + lse_offsets[i] // 16
        part_lse = tl.load(part_lses[i] + at, mask=seen, other=-float("inf"))
        largest = tl.maximum(largest, part_lse, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.where(largest == -float("inf"), 0.0, largest)

    total = tl.zeros((ROWS, WIDTH), tl.float32)
    weights = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, inside, places, i)
        strides = lse_batch_strides[i], lse_head_strides[i], lse_token_strides[i]
        at = _row_at(batch, head, at_token, strides) + lse_offsets[i] // 16
        part_lse = tl.load(part_lses[i] + at, mask=seen, other=-float("inf"))
        weight = tl.exp(part_lse - shift)
        share = tl.where(largest == -float("inf"), 1.0, weight)
        counts = seen & ((part_lse != -float("inf")) | (largest == -float("inf")))
        place = batch * batch_strides[i] + at_token * token_strides[i] + head * head_strides[i]
        mask = counts[:, None] & (column < head_size)[None, :]
        total += share[:, None] * tl.load(
            parts[i] + place[:, None] + column[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        weights += weight

    divisor = tl.where(weights == 0.0, 1.0, weights)  # 0: nothing seen
    total = total / divisor[:, None]
    place = batch * out_strides[0] + token * out_strides[1] + head * out_strides[2]
    mask = inside[:, None] & (column < head_size)[None, :]
    tl.store(
        out + place[:, None] + column[None, :] * out_strides[3],
        total.to(out.dtype.element_ty),
        mask=mask,
    )
    total_lse = tl.where(weights == 0.0, -float("inf"), shift + tl.log(divisor))
    tl.store(lse + _row_at(batch, head, token, lse_strides), total_lse, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _sum_gradients(
    total, total_strides, parts, batch_strides, token_strides, head_strides,
    places, tokens, heads, head_size,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token * heads + head
    batch = tl.program_id(1).to(tl.int64)
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    there = row < tokens * heads
    if IN_PLACE:
        there &= _more_came(token, there, places, PARTS)
    inside = there[:, None] & (column < head_size)[None, :]

    wide = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, there, places, i)
        mask = inside & seen[:, None]
        at = batch * batch_strides[i] + at_token * token_strides[i] + head * head_strides[i]
        wide += tl.load(parts[i] + at[:, None] + column[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    at = batch * total_strides[0] + token * total_strides[1] + head * total_strides[2]
    place = total + at[:, None] + column[None, :] * total_strides[3]
    tl.store(place, wide.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _more_came(token, inside, places, PARTS: tl.constexpr):
    """Whether other parts than the first have tokens, of those inside."""
    result = token < 0
    for i in tl.static_range(1, PARTS):
        _, seen = _in_part(token, inside, places, i)
        result |= seen
    return result


@triton.jit
def _in_part(token, inside, places, i: tl.constexpr):
    """Where tokens are in a part, and which of those inside it has; `places` are `_places`."""
    if len(places) == 1:
        at = tl.load(places[0][i] + token, mask=inside, other=-1).to(tl.int64)
        seen = at >= 0
    else:
        at = token - places[0][i] // 16
        seen = inside & (at >= 0) & (token < places[1][i] // 16)
    return at, seen


@triton.jit
def _row_at(batch, head, token, strides):
    """Where tokens' numbers are in lse (B, H, S), of strides `multiply_by_16`."""
    return batch * (strides[0] // 16) + head * (strides[1] // 16) + token * (strides[2] // 16)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["lse"])
def _fill_lse_delta(
    rows, out, dout, lse, out_strides, dout_strides, lse_strides, tokens, heads, head_size,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token * heads + head
    batch = tl.program_id(1).to(tl.int64)
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = row < tokens * heads
    mask = inside[:, None] & (column < head_size)[None, :]

    at = batch * out_strides[0] + token * out_strides[1] + head * out_strides[2]
    o = tl.load(out + at[:, None] + column[None, :] * out_strides[3], mask=mask, other=0.0).to(
        tl.float32
    )
    at = batch * dout_strides[0] + token * dout_strides[1] + head * dout_strides[2]
    do = tl.load(dout + at[:, None] + column[None, :] * dout_strides[3], mask=mask, other=0.0).to(
        tl.float32
    )
    row_lse = tl.load(lse + _row_at(batch, head, token, lse_strides), mask=inside)

    place = rows + ((batch * tokens + token) * heads + head) * 2
    tl.store(place, row_lse, mask=inside)
    tl.store(place + 1, tl.sum(o * do, 1), mask=inside)
