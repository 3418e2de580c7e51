"""Triton kernels that add up in one pass. `bmt_burst.merging.parts` specifies them.

Tensors may have any strides. Spans, lengths and the strides of lse differ from call to call, so
kernels take them times 16 (see `multiply_by_16`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.compiled import multiply_by_16
from ..base.streams import Stream, current_stream, send_to_device
from ..sequence.span import Span, length
from .parts import GradientPart, OutputPart, Parts, clip_parts, find_unfinished, lies_in, tokens_at

_BLOCK = 2048  # entries that a program handles


def merge_outputs(out: Tensor, lse: Tensor, parts: list[OutputPart]) -> None:
    if not (span := find_unfinished(parts, out)):
        return
    total, total_lse = tokens_at(out, span), lse[:, :, slice(*span)]
    parts = _fill_up(clip_parts(parts, span))
    grid, sizes, shape = _by_rows(total)
    lses = [part[2] for part in parts]
    # Triton compiles a kernel again for addresses that are no multiples of 16, and in a tuple
    # nothing prevents that. So it gets where memory begins, and offsets apart.
    starts = tuple(part_lse.as_strided((1,), (1,), 0) for part_lse in lses)
    offsets = multiply_by_16(int(part_lse.storage_offset()) for part_lse in lses)
    lse_strides = tuple(multiply_by_16(x.stride(dim) for x in lses) for dim in range(3))
    tensors = total, total_lse, _pack(parts, total), (starts, offsets, lse_strides)
    strides = total.stride(), multiply_by_16(total_lse.stride())
    constants = len(parts), *shape, lies_in(parts[0], total)
    _merge_outputs[grid](*tensors, *strides, *sizes, *constants)


def sum_gradients(total: Tensor, parts: list[GradientPart]) -> None:
    if not (span := find_unfinished(parts, total)):
        return
    total, parts = tokens_at(total, span), _fill_up(clip_parts(parts, span))
    grid, sizes, shape = _by_rows(total)
    constants = len(parts), *shape, lies_in(parts[0], total)
    _sum_gradients[grid](total, _pack(parts, total), total.stride(), *sizes, *constants)


def fill_lse_delta(rows: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> None:
    grid, sizes, constants = _by_rows(out)
    strides = out.stride(), dout.stride(), multiply_by_16(lse.stride())
    _fill_lse_delta[grid](rows, out, dout, lse, *strides, rows.shape[-1], *sizes, *constants)


def _fill_up(parts: list[Any]) -> list[Any]:
    """Return the parts, and empty ones up to a power of two, since each number is compiled. They
    are like the last part: the first may have another dtype than all others.
    """
    missing = triton.next_power_of_2(len(parts)) - len(parts)
    return [*parts, *([([(0, 0)], *parts[-1][1:])] * missing)]


def _pack(parts: Parts, total: Tensor) -> tuple[tuple[Any, ...], ...]:
    """Return the tensors of parts, with contiguous rows, their strides of batches, tokens and
    heads, and their tokens: (starts, stops) times 16 if each has one span, else (maps,).
    """
    rows = [x if x.stride(3) == 1 else x.contiguous() for _, x, *_ in parts]
    strides = tuple(tuple(x.stride(dim) for x in rows) for dim in range(3))
    places: tuple[Any, ...]
    if all(len(part[0]) == 1 for part in parts):
        places = tuple(multiply_by_16(part[0][0][end] for part in parts) for end in (0, 1))
    else:
        device, tokens = total.device, int(total.shape[1])
        stream = current_stream(device)
        places = (tuple(_map(tuple(part[0]), tokens, device, stream) for part in parts),)
    return tuple(rows), strides, places


@functools.lru_cache(maxsize=128)
def _map(
    spans: tuple[Span, ...], tokens: int, device: torch.device, stream: Stream | None
) -> Tensor:
    """Return where each token is in a part of rising spans, else -1, for `stream`: (tokens,)."""
    places = torch.full((tokens,), -1, dtype=torch.int32)
    starts, stops = torch.tensor(spans).unbind(1)
    counts = stops - starts
    place = torch.arange(sum(map(length, spans)), dtype=torch.int32)
    places[place + (starts - counts.cumsum(0) + counts).repeat_interleave(counts)] = place
    return send_to_device(places, device)


def _by_rows(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int], tuple[int, int]]:
    """Return how programs share the S * H rows of x (B, S, H, D): the grid, (S, H, D), and the rows
    of a program with their width.
    """
    batch, tokens, heads, head_size = x.shape
    width = triton.next_power_of_2(head_size)
    rows = max(1, _BLOCK // width)
    grid = triton.cdiv(tokens * heads, rows), batch
    return grid, (tokens, heads, head_size), (rows, width)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["lse"])
def _merge_outputs(
    out, lse, parts, lses, out_strides, lse_strides, tokens, heads, head_size,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    batch, token, head, inside = _rows_here(tokens, heads, ROWS)
    column = tl.arange(0, WIDTH)
    if IN_PLACE:
        inside &= _in_later_parts(token, inside, parts, PARTS)

    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, inside, parts, i)
        part_lse = _load_lse(lses, batch, head, at_token, seen, i)
        largest = tl.maximum(largest, part_lse, propagate_nan=tl.PropagateNan.ALL)
    # Without any lse, -inf - -inf would be NaN. A NaN of one part is to be in the result: so the
    # maximum above propagates it.
    shift = tl.where(largest == -float("inf"), 0.0, largest)

    total = tl.zeros((ROWS, WIDTH), tl.float32)
    weights = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, inside, parts, i)
        part_lse = _load_lse(lses, batch, head, at_token, seen, i)
        weight = tl.exp(part_lse - shift)
        # Where no part saw anything, outs are added as they are: 0, or NaN if all scores are -inf.
        share = tl.where(largest == -float("inf"), 1.0, weight)
        counts = seen & ((part_lse != -float("inf")) | (largest == -float("inf")))
        mask = counts[:, None] & (column < head_size)[None, :]
        rows = _load_part(parts, batch, head, at_token, column, mask, i)
        total += share[:, None] * rows
        weights += weight

    divisor = tl.where(weights == 0.0, 1.0, weights)  # 0: nothing seen
    mask = inside[:, None] & (column < head_size)[None, :]
    out_places = _rows_at(out, out_strides, batch, head, token, column)
    tl.store(out_places, (total / divisor[:, None]).to(out.dtype.element_ty), mask=mask)
    total_lse = tl.where(weights == 0.0, -float("inf"), shift + tl.log(divisor))
    tl.store(lse + _row_at(batch, head, token, lse_strides), total_lse, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _sum_gradients(
    total, parts, total_strides, tokens, heads, head_size,
    PARTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    batch, token, head, there = _rows_here(tokens, heads, ROWS)
    column = tl.arange(0, WIDTH)
    if IN_PLACE:
        there &= _in_later_parts(token, there, parts, PARTS)
    inside = there[:, None] & (column < head_size)[None, :]

    wide = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.static_range(PARTS):
        at_token, seen = _in_part(token, there, parts, i)
        mask = inside & seen[:, None]
        wide += _load_part(parts, batch, head, at_token, column, mask, i)
    total_places = _rows_at(total, total_strides, batch, head, token, column)
    tl.store(total_places, wide.to(total.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["lse"])
def _fill_lse_delta(
    rows, out, dout, lse, out_strides, dout_strides, lse_strides, columns, tokens, heads, head_size,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, token, head, inside = _rows_here(tokens, heads, ROWS)
    column = tl.arange(0, WIDTH)
    mask = inside[:, None] & (column < head_size)[None, :]

    o_places = _rows_at(out, out_strides, batch, head, token, column)
    do_places = _rows_at(dout, dout_strides, batch, head, token, column)
    o = tl.load(o_places, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_places, mask=mask, other=0.0).to(tl.float32)
    row_lse = tl.load(lse + _row_at(batch, head, token, lse_strides), mask=inside)

    place = rows + ((batch * tokens + token) * heads + head) * columns
    tl.store(place, row_lse, mask=inside)
    tl.store(place + 1, tl.sum(o * do, 1), mask=inside)


@triton.jit
def _rows_here(tokens, heads, ROWS: tl.constexpr):
    """Return the batch, the tokens and the heads of this program's rows, and which rows exist."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # token * heads + head
    batch = tl.program_id(1).to(tl.int64)
    return batch, (row // heads).to(tl.int64), (row % heads).to(tl.int64), row < tokens * heads


@triton.jit
def _in_later_parts(token, inside, parts, PARTS: tl.constexpr):
    """Return which tokens of those inside are in a part after the first."""
    result = token < 0
    for i in tl.static_range(1, PARTS):
        _, seen = _in_part(token, inside, parts, i)
        result |= seen
    return result


@triton.jit
def _in_part(token, inside, parts, i: tl.constexpr):
    """Return where tokens are in a part, and which of those inside it has."""
    _, _, places = parts
    if len(places) == 1:
        at = tl.load(places[0][i] + token, mask=inside, other=-1).to(tl.int64)
        seen = at >= 0
    else:
        at = token - places[0][i] // 16
        seen = inside & (at >= 0) & (token < places[1][i] // 16)
    return at, seen


@triton.jit
def _row_at(batch, head, token, strides):
    """Return the offsets of tokens in lse (B, H, S). Strides are times 16."""
    return batch * (strides[0] // 16) + head * (strides[1] // 16) + token * (strides[2] // 16)


@triton.jit
def _load_lse(lses, batch, head, token, seen, i: tl.constexpr):
    """Load the lse of part i, -inf for tokens that it does not have."""
    starts, offsets, strides = lses
    at = _row_at(batch, head, token, (strides[0][i], strides[1][i], strides[2][i]))
    return tl.load(starts[i] + at + offsets[i] // 16, mask=seen, other=-float("inf"))


@triton.jit
def _load_part(parts, batch, head, token, column, mask, i: tl.constexpr):
    """Load rows of part i in fp32."""
    rows, strides, _ = parts
    at = batch * strides[0][i] + token * strides[1][i] + head * strides[2][i]
    return tl.load(rows[i] + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rows_at(x, strides, batch, head, token, column):
    """Return the addresses of rows of x (B, S, H, D)."""
    at = batch * strides[0] + token * strides[1] + head * strides[2]
    return x + at[:, None] + column[None, :] * strides[3]
