"""The passes as Triton kernels. `torch_passes` specifies them.

Offsets of rows are 64-bit numbers: a tensor may have more than 2^31 entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.streams import count_processors
from ..sequence.layout import IGNORE_INDEX

_BLOCK, _GATED = 4096, 1024  # entries of a program
_TOKENS, _HEADS = 16, 8  # that a program rotates, at most
_ROTATED = 2048  # pairs that it rotates at once
_LOGITS, _WARPS = 8192, 16  # few programs at a time: the L2 cache holds their rows of logits
_NO_TARGET = tl.constexpr(IGNORE_INDEX)
_PROGRAMS_A_PROCESSOR = 8  # of the gradient of a norm: each holds a sum of dweight


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which launches on the device of its first tensor."""

    @functools.wraps(function)
    def call(x: Tensor, *args: Any, **named: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *args, **named)

    return call


@_on_its_device
def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    *rows, tokens, heads, head_size = x.shape
    half = head_size // 2
    of_table = rows if cos.dim() > 2 else []
    of_row = tokens if of_table else 0  # rows of cos and sin from one batch to the next
    cos, sin = (table.expand(*of_table, tokens, half).contiguous() for table in (cos, sin))
    x = x.contiguous()
    out = torch.empty_like(x)
    width = triton.next_power_of_2(half)
    tile = max(1, min(_TOKENS, _ROTATED // width))
    grid = triton.cdiv(tokens, tile), triton.cdiv(heads, _HEADS), math.prod(rows)
    constants = {"TOKENS": tile, "HEADS": _HEADS, "WIDTH": width}
    sign = -1.0 if back else 1.0
    _rotate_pairs[grid](x, cos, sin, out, sign, tokens, heads, half, of_row, **constants)
    return out


@_on_its_device
def gate(gate: Tensor, up: Tensor, silu: bool = True) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out, entries = torch.empty_like(gate), gate.numel()
    _gate[triton.cdiv(entries, _GATED),](gate, up, out, entries, SILU=silu, BLOCK=_GATED)
    return out


@_on_its_device
def gate_gradients(
    gate: Tensor, up: Tensor, dout: Tensor, again: bool, silu: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    gate, up, dout = gate.contiguous(), up.contiguous(), dout.contiguous()
    dgate, dup, entries = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    _gate_gradients[triton.cdiv(entries, _GATED),](
        gate, up, dout, dgate, dup, entries, AGAIN=again, SILU=silu, BLOCK=_GATED
    )
    return dgate, dup, dout if again else None


@_on_its_device
def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out, r = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    rows, tile, constants = _tiles(x)
    _normalize[triton.cdiv(rows, tile),](x, weight, out, r, eps, rows, x.shape[-1], **constants)
    return out, r


@_on_its_device
def norm_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, r: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    dout, x = dout.contiguous(), x.contiguous()
    out = torch.empty_like(x)
    rows, tile, constants = _tiles(x)
    tiles = max(triton.cdiv(rows, tile), 1)  # one without rows, if a rank has no tokens
    programs = min(tiles, _PROGRAMS_A_PROCESSOR * count_processors(x.device, interpreted=1))
    sums = x.new_empty((programs, x.shape[-1]), dtype=torch.float32)
    _norm_gradients[programs,](
        dout, x, weight, r, out if dx is None else dx.contiguous(), out, sums,
        rows, x.shape[-1], triton.cdiv(tiles, programs), ADDS=dx is not None, **constants,
    )  # fmt: skip
    return out, sums.sum(0).to(weight.dtype)


@_on_its_device
def compute_losses(logits: Tensor, columns: int, labels: Tensor, differentiate: bool) -> Tensor:
    tokens, width = logits.shape
    assert width % 16 == 0, "rows begin at aligned addresses"
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        constants = {"DIFFERENTIATE": differentiate, "BLOCK": _LOGITS, "num_warps": _WARPS}
        _compute_losses[tokens,](logits, labels, losses, columns, width, **constants)
    return losses


def _tiles(x: Tensor) -> tuple[int, int, dict[str, int]]:
    """Return the rows of x (..., E), those of a tile, and the constants of its kernels."""
    width = triton.next_power_of_2(x.shape[-1])
    tile = max(1, _BLOCK // width)
    warps = min(max(tile * width // 512, 4), 16)
    return x.numel() // x.shape[-1], tile, {"ROWS": tile, "WIDTH": width, "num_warps": warps}


@triton.jit(do_not_specialize=["sign", "tokens", "of_row"])
def _rotate_pairs(
    x, cos, sin, out, sign, tokens, heads, half, of_row,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first, batch = tl.program_id(1) * HEADS, tl.program_id(2).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (column < half)[None, :]
    table = (batch * of_row + token)[:, None] * half + column[None, :]
    c = tl.load(cos + table, mask=inside, other=0.0)
    s = tl.load(sin + table, mask=inside, other=0.0) * sign
    rows = (batch * tokens + token)[:, None] * heads
    for head in range(first, tl.minimum(first + HEADS, heads)):
        place = (rows + head) * (2 * half) + column[None, :]
        left = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, (left * c - right * s).to(out.dtype.element_ty), mask=inside)
        tl.store(out + place + half, (right * c + left * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(gate, up, out, entries, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    x = tl.load(gate + at, mask=inside).to(tl.float32)
    y = tl.load(up + at, mask=inside).to(tl.float32)
    factor = tl.sigmoid(x)
    if SILU:
        factor *= x
    tl.store(out + at, (factor * y).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_gradients(
    gate, up, dout, dgate, dup, entries,
    AGAIN: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill dgate and dup. If asked, write the result of `_gate` into dout."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < entries
    kind = dgate.dtype.element_ty
    x = tl.load(gate + at, mask=inside).to(tl.float32)
    y = tl.load(up + at, mask=inside).to(tl.float32)
    dz = tl.load(dout + at, mask=inside).to(tl.float32)
    share = tl.sigmoid(x)
    factor = share
    slope = share * (1 - share)
    if SILU:
        factor = x * share
        slope = share * (1 + x * (1 - share))
    tl.store(dgate + at, (dz * y * slope).to(kind), mask=inside)
    tl.store(dup + at, (dz * factor).to(kind), mask=inside)
    if AGAIN:
        tl.store(dout + at, (factor * y).to(kind), mask=inside)


@triton.jit(do_not_specialize=["eps", "rows"])
def _normalize(
    x, weight, out, r, eps, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normed = wide * scale[:, None] * w[None, :]
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)
    tl.store(r + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _norm_gradients(
    dout, x, weight, r, residual, dx, sums, rows, width, tiles,
    ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill dx of `tiles` tiles of rows, and a row of sums, their part of dweight."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(tiles):
        row = (program * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        place = row[:, None] * width + column[None, :]
        scale = tl.load(r + row, mask=row < rows, other=0.0)[:, None]
        dy = tl.load(dout + place, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
        dnormed = dy * w[None, :]
        mean = tl.sum(dnormed * normed, 1)[:, None] / width
        grad = scale * (dnormed - normed * mean)
        if ADDS:
            grad += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + place, grad.to(dx.dtype.element_ty), mask=inside)
        total += dy * normed
    tl.store(sums + program * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["labels", "losses"])
def _compute_losses(
    logits, labels, losses, columns, width, DIFFERENTIATE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Fill losses, and if asked replace logits by their gradient. A program computes a row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    label = tl.load(labels + row).to(tl.int32)
    # The caller reports a label outside the vocabulary. Here it must not read outside the row.
    is_inside = (label >= 0) & (label < columns)
    target = tl.load(logits + label, mask=is_inside, other=0.0).to(tl.float32)

    largest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        # Masks end at the width, a multiple of 16, so that loads are wide.
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        x = tl.where(column < columns, x, -float("inf"))
        higher = tl.maximum(largest, tl.max(x, 0))
        # -inf - -inf would be NaN
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = higher
    lse = largest + tl.log(tl.sum(total, 0))
    tl.store(losses + row, tl.where(label == _NO_TARGET, 0.0, lse - target))

    if DIFFERENTIATE:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
            probs = tl.exp(x - lse) - tl.where(column == label, 1.0, 0.0)
            probs = tl.where(label == _NO_TARGET, 0.0, probs)
            tl.store(logits + column, probs.to(logits.dtype.element_ty), mask=column < width)
