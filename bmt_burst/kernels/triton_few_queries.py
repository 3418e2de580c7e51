"""The functions of `few_queries.py` in Triton, for GPUs.

The query heads of a kv head are rows of a tile, so that each key is read once. A program computes
one split of the keys for a tile of rows. How many splits there are depends on shapes only. Where a
split begins and ends depends on the spans, which are read from the GPU's memory. So a CUDA graph
serves any number of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.streams import count_processors
from ..merging.parts import Partials
from ..spec import Spec
from .triton import LaunchShape, padded_width, precision, shape_of, shared_memory
from .triton_blocks import add_product, scores_of, weigh
from .triton_memory import INFINITY, LN_2, LOG2_E, read, token_at, wide

_FEW_ROWS = 64  # with more rows, tiles have the shape of the Triton kernel's forward
_MOST_SPLITS = 512  # a program of `_merge` holds a row's lse of all
_WAVES = 2  # programs for each processor
_COLUMNS = 32  # of a program of `_merge`


def put(k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor, places: Tensor) -> None:
    batch, tokens, groups, head_size = k.shape
    entries = groups * head_size
    _put[tokens, batch](
        k.contiguous(), v.contiguous(), kept_k, kept_v, places, kept_k.shape[1], entries,
        BLOCK=triton.next_power_of_2(entries),
    )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, spec: Spec) -> Partials:
    q = q.contiguous()
    batch, tokens, heads, head_size = q.shape
    groups = k.shape[2]
    rows = tokens * (heads // groups)
    shape = choose_shape(q, rows)
    tiles = triton.cdiv(rows, shape.M)
    programs = count_programs(q) // (tiles * groups * batch)
    splits = max(1, min(programs, triton.cdiv(k.shape[1], shape.N), _MOST_SPLITS))
    outs = q.new_empty(splits, *q.shape, dtype=torch.float32)
    lses = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
    _attend[tiles, splits, groups * batch](
        q, k, v, spans, outs, lses, k.stride(), v.stride(), spec.scale, tokens, lses[0].numel(),
        HEADS=heads, GROUPS=groups, D=head_size, WIDTH=padded_width(q),
        M=shape.M, N=shape.N, PRECISION=precision(q), CAP=spec.softcap, **shape.options,
    )  # fmt: skip
    return outs, lses


def merge(parts: Partials, out: Tensor, lse: Tensor) -> None:
    outs, lses = parts
    count, head_size = len(outs), out.shape[-1]
    _merge[lse.numel(), triton.cdiv(head_size, _COLUMNS)](
        outs, lses, out, lse, outs.stride(0), lses.stride(0), count, head_size,
        PARTS=triton.next_power_of_2(count), COLUMNS=_COLUMNS,
    )  # fmt: skip


def count_programs(q: Tensor) -> int:
    """Return how many programs fill q's device."""
    return _WAVES * count_processors(q.device, interpreted=4)


def choose_shape(q: Tensor, rows: int) -> LaunchShape:
    """Return the shape of tiles. Few rows wait for memory, so two programs share a processor."""
    if rows > _FEW_ROWS or not q.is_cuda:
        return shape_of("forward", q, "half")
    size = max(16, triton.next_power_of_2(rows))
    keys = 64 if q.element_size() * q.shape[-1] <= 256 else 32
    stage = 2 * keys * triton.next_power_of_2(q.shape[-1]) * q.element_size()
    stages = max(1, min(3, shared_memory(q.device) // 2 // stage))
    return LaunchShape(size, keys, 4, stages)


@triton.jit(do_not_specialize=["kept_tokens"], do_not_specialize_on_alignment=["places"])
def _put(k, v, kept_k, kept_v, places, kept_tokens, entries, BLOCK: tl.constexpr):
    """Write one token of one row of the batch."""
    token, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = tl.load(places + token)
    column = tl.arange(0, BLOCK)
    inside = column < tl.where(place >= 0, entries, 0)
    here = (batch * tl.num_programs(0) + token) * entries + column
    there = (batch * kept_tokens + place) * entries + column
    tl.store(kept_k + there, tl.load(k + here, mask=inside), mask=inside)
    tl.store(kept_v + there, tl.load(v + here, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["spans", "lses"])
def _attend(
    q, k, v, spans, outs, lses, k_strides, v_strides, scale, tokens, rows,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Fill out and lse of one split of the keys, for M rows of a kv head: a query and one of its
    heads. `rows` are those of all heads and of the batch.
    """
    SHARE: tl.constexpr = HEADS // GROUPS
    split, splits = tl.program_id(1), tl.num_programs(1)
    group, batch = tl.program_id(2) % GROUPS, tl.program_id(2) // GROUPS
    row = tl.program_id(0) * M + tl.arange(0, M)
    token, inside = row // SHARE, row < tokens * SHARE
    starts = tl.load(spans + 2 * token, mask=inside, other=2147483647).to(tl.int32)
    stops = tl.load(spans + 2 * token + 1, mask=inside, other=0).to(tl.int32)
    first, last = tl.min(starts, 0), tl.max(stops, 0)
    size = tl.cdiv(tl.cdiv(last - first, splits), N) * N
    begin = tl.minimum(first + split * size, last)
    end = tl.minimum(begin + size, last)

    # Keys that some rows do not see lie before those that all see, or after them.
    low = tl.max(tl.where(inside, starts, 0), 0)
    high = tl.minimum(tl.min(tl.where(inside, stops, 2147483647), 0), end)
    whole = tl.minimum(begin + tl.cdiv(tl.maximum(low - begin, 0), N) * N, end)
    whole_end = tl.maximum(begin + tl.maximum(high - begin, 0) // N * N, whole)
    edges = begin, whole, whole_end, end

    head = (batch * tokens + token).to(tl.int64) * HEADS + group * SHARE + row % SHARE
    column = tl.arange(0, WIDTH)
    entries = head[:, None] * D + column[None, :]
    exist = inside[:, None] & (column < D)[None, :]
    q_block = tl.load(q + entries, mask=exist, other=0.0)
    k_rows = token_at(k, k_strides, batch, group, 0)
    v_rows = token_at(v, v_strides, batch, group, 0)
    SCALED: tl.constexpr = CAP is not None
    factor = 1.0 if SCALED else scale * LOG2_E
    sums = tl.zeros((M, WIDTH), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -INFINITY, tl.float32)
    for part in tl.static_range(3):
        for at in tl.range(edges[part], edges[part + 1], N):
            k_block = read(k_rows, k_strides, at, end - at, D, WIDTH, N, part != 1)
            scores = scores_of(q_block, k_block, scale, PRECISION, CAP, SCALED)
            if part != 1:
                key = at + tl.arange(0, N)[None, :]
                seen = (key >= starts[:, None]) & (key < stops[:, None]) & (key < end)
                scores = tl.where(seen, scores, -INFINITY)
            probs, decay, weights, largest = weigh(scores, factor, weights, largest)
            v_block = read(v_rows, v_strides, at, end - at, D, WIDTH, N, part != 1)
            sums = add_product(probs, v_block, sums * decay[:, None], PRECISION)
    store_part(outs, lses, split, rows, head, sums, weights, largest, inside, D, WIDTH)


@triton.jit
def store_part(
    outs, lses, split, rows, row, sums, weights, largest, inside,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the results of one split of the keys for some rows."""
    column = tl.arange(0, WIDTH)
    sees = weights != 0.0  # `_merge` does not read the out of rows without keys
    mean = sums / tl.where(sees, weights, 1.0)[:, None]
    at = wide(split) * rows + row
    exist = (inside & sees)[:, None] & (column < D)[None, :]
    tl.store(outs + at[:, None] * D + column[None, :], mean, mask=exist)
    tl.store(lses + at, (largest + tl.log2(weights)) * LN_2, mask=inside)


@triton.jit(
    do_not_specialize=["lse_stride", "count"], do_not_specialize_on_alignment=["lses", "lse"]
)
def _merge(
    outs, lses, out, lse, out_stride, lse_stride, count, head_size,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fill lse and some columns of out of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS).to(tl.int64)
    part_lses = tl.load(lses + part * lse_stride + row, mask=part < count, other=-INFINITY)
    largest = tl.max(part_lses, 0)
    shift = tl.where(largest == -INFINITY, 0.0, largest)
    shares = tl.exp(part_lses - shift)
    total = tl.sum(shares, 0)
    divisor = tl.where(total == 0.0, 1.0, total)  # 0: nothing seen

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exist = (part_lses != -INFINITY)[:, None] & (column < head_size)[None, :]
    places = part[:, None] * out_stride + row * head_size + column[None, :]
    rows = tl.load(outs + places, mask=exist, other=0.0)
    mean = tl.sum(rows * shares[:, None], 0) / divisor
    inside = column < head_size
    tl.store(out + row * head_size + column, mean.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row, shift + tl.log(total), mask=tl.program_id(1) == 0)
