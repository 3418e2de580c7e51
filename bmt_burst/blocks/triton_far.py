"""Triton kernels of the far part of sparse attention. `far.py` specifies them.

forward, dq  A program has a tile of neighbouring queries with the query heads of one kv head. It
             loops over the union of the tile's blocks. Bits say which query chose which block.
dk, dv       A program has a block of keys and loops over the queries that chose it. Long lists of
             queries have several programs. Their sums are added in a second launch.

Programs add up in a fixed order, so results are bit-identical between runs. Unions and lists are
computed once for each `FarBlocks`, for any parts of the sequence at hand (see `tiles.py`). Forward
and dq load blocks of keys by Hopper's copy engine (TMA), if it can address them, which saves a
sixth of their time on an H100. Exponents are to base 2. Products are of the inputs' dtype, and sums
are fp32.

Letters: S tokens, F of them that choose, H query heads, G kv heads, D head size, T keys at hand.
GROUP query heads share a kv head, and HEADS is the power of two that they are padded to. WIDTH is
that of D, and N that of a block's tokens. A tile or a step has TOKENS queries, so M = TOKENS *
HEADS rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..base.compiled import multiply_by_16
from ..kernels.packed import prepare_once
from ..kernels.triton import LaunchShape, make_dense, padded_width, precision, shared_memory
from ..kernels.triton_blocks import add_product, weigh
from ..kernels.triton_memory import (
    INFINITY,
    LN_2,
    LOG2_E,
    address_rows,
    load_rows,
    store_rows,
    wide,
)
from .far import FarKeys
from .tiles import MOST_QUERIES, NONE, KeyLists, find_between, unite_blocks

_NOWHERE = tl.constexpr(NONE)

# See `kernels/triton_blocks.py`. These numbers and addresses differ from call to call.
_NUMBERS = ["queries", "first", "keys", "entries", "most", "slot_count"]
_ROWS = ["lse", "lse_delta", "tokens", "stops"]

# The fastest on one H200, with head size 128, 16 query heads a kv head, and blocks of 64. Forward
# and dq share their unions, so they have equal rows. More rows of dk and dv spill registers.
_HALF = {
    "forward": LaunchShape(64, 64, 4, 3),
    "dq": LaunchShape(64, 64, 4, 2),
    "dkdv": LaunchShape(32, 64, 4, 3),
}
_COPY_ENGINE = 9  # compute capability of the oldest GPUs with one that loads blocks
_SCRATCH = 2048  # bytes of shared memory for anything but operands
_SINGLE = {name: shape._replace(stages=1) for name, shape in _HALF.items()}  # not measured
_INTERPRETED = dict.fromkeys(_HALF, LaunchShape(16, 16, 4, 1))


def add_far_outputs(q: Tensor, far: FarKeys, out: Tensor, lse: Tensor) -> None:
    """Do what `far.add_far_outputs` does, for fp16, bf16 or fp32 tensors."""
    q, k, v = map(make_dense, (q, far.k, far.v))
    if far.blocks.starts.numel() and k.numel():
        _launch_by_tiles("forward", _forward, (q, k, v, out, lse), far)


def add_far_gradients(
    dout: Tensor, q: Tensor, far: FarKeys, lse_delta: Tensor, dq: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Do what `far.add_far_gradients` does, for fp16, bf16 or fp32 tensors."""
    q, k, v, dout = map(make_dense, (q, far.k, far.v, dout))
    if far.blocks.starts.numel() and k.numel():
        inputs = q, k, v, dout, lse_delta
        _launch_by_tiles("dq", _dq, (*inputs, dq), far)
        _launch_by_lists((*inputs, dk, dv), far)


def _launch_by_tiles(
    name: str, kernel: triton.JITFunction, tensors: tuple[Tensor, ...], far: FarKeys
) -> None:
    """Launch the kernel of forward or dq. The first of `tensors` are q, k and v, all dense."""
    q, k, v, *others = tensors
    blocks, first, scale = far.blocks, far.first, far.scale
    shape = _find_shape(name, q, k, blocks.block_size)
    constants = _constants(q, k, blocks.block_size)
    tokens = count_tokens(shape.M, constants["HEADS"])
    starts, chosen = prepare_once(
        blocks, ("tiles", tokens), q.device, lambda: unite_blocks(blocks.starts, tokens)
    )
    ranges = find_between(starts, first - blocks.block_size + 1, first + len(k))
    copies = _can_copy(k, constants) and _can_copy(v, constants)
    keys = [_describe(x, constants) if copies else x for x in (k, v)]
    strides, lists = map(_kernel_strides, tensors), (blocks.queries, blocks.stops, starts, chosen)
    numbers = len(blocks.queries), first, len(k), starts.shape[2], scale
    constants |= {"COPIES": copies, "TOKENS": tokens, **shape.options}
    programs = starts.shape[1], k.shape[1]
    kernel[programs](q, *keys, *others, *strides, *lists, ranges, *numbers, **constants)


def _can_copy(x: Tensor, constants: dict[str, Any]) -> bool:
    """Whether the copy engine can load blocks of x (T, G, D): whole blocks of aligned rows."""
    sizes = constants["D"] == constants["WIDTH"] and constants["BLOCK"] == constants["N"]
    rows = x.stride(1) == x.shape[2] and x.stride(0) * x.element_size() % 16 == 0
    is_new = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= _COPY_ENGINE
    return is_new and sizes and rows and x.data_ptr() % 16 == 0


def _describe(x: Tensor, constants: dict[str, Any]) -> TensorDescriptor:
    """Describe x (T, G, D) to the copy engine, as (T, G * D)."""
    shape, block = [len(x), x.shape[1] * x.shape[2]], [constants["N"], constants["D"]]
    return TensorDescriptor(x, shape, [x.stride(0), 1], block)


def _launch_by_lists(tensors: tuple[Tensor, ...], far: FarKeys) -> None:
    """Launch the kernels of dk and dv, the last two of `tensors`. The first two are q and k."""
    q, k, *_, dk, dv = tensors
    blocks, first, scale = far.blocks, far.first, far.scale
    shape = _find_shape("dkdv", q, k, blocks.block_size)
    constants = _constants(q, k, blocks.block_size)
    lists = prepare_once(blocks, ("lists",), q.device, lambda: KeyLists.of_blocks(blocks))
    ranges = find_between(lists.starts, first - blocks.block_size + 1, first + len(k))
    groups, slots = k.shape[1], lists.slot_count
    held = torch.empty(groups, slots, 2, constants["N"], constants["WIDTH"], device=q.device)
    held_starts, reaches = ranges.new_full((2, groups, slots), NONE).unbind()
    # Programs take another part until none is left, because the host does not know the count.
    programs = -(-len(k) // blocks.block_size) + 1 + slots
    strides, parts = map(_kernel_strides, tensors), (held, held_starts, reaches)
    table = blocks.stops, lists.tokens, lists.starts, lists.begins, ranges, lists.slots
    numbers = first, len(k), lists.tokens.shape[1], lists.starts.shape[1], slots, scale
    options = {"TOKENS": count_tokens(shape.M, constants["HEADS"]), **shape.options}
    _dkdv[programs, groups](*tensors, *strides, *table, *parts, *numbers, **constants, **options)
    if slots:
        sizes = {name: constants[name] for name in ("D", "WIDTH", "BLOCK", "N")}
        grads = dk, dv, dk.stride(), dv.stride()
        _add_parts[slots, groups](*parts, *grads, first, len(k), slots, **sizes)


def _constants(q: Tensor, k: Tensor, block_size: int) -> dict[str, Any]:
    """Return the constants that all kernels of a call have."""
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "HEADS": triton.next_power_of_2(q.shape[1] // k.shape[1]),
        "D": q.shape[-1],
        "WIDTH": padded_width(q),
        "BLOCK": block_size,
        "N": max(triton.next_power_of_2(block_size), 16),
        "PRECISION": precision(q),
    }


def fits(q: Tensor, k: Tensor, block_size: int) -> bool:
    """Whether a GPU's shared memory holds what each of the kernels loads at once."""
    return all(_find_shape(name, q, k, block_size).stages for name in _HALF)


def _find_shape(name: str, q: Tensor, k: Tensor, block_size: int) -> LaunchShape:
    """Return the launch shape of a kernel, with as many stages as shared memory holds."""
    if not q.is_cuda:
        return _INTERPRETED[name]
    shape = (_SINGLE if q.dtype == torch.float32 else _HALF)[name]
    constants = _constants(q, k, block_size)
    heads = constants["HEADS"]
    rows, keys = count_tokens(shape.M, heads) * heads, 2 * constants["N"]
    # A program keeps the rows of one side, and loads rows of the other side in each stage.
    kept, loaded = {"forward": (rows, keys), "dq": (2 * rows, keys), "dkdv": (keys, 2 * rows)}[name]
    row_bytes = constants["WIDTH"] * q.element_size()
    if q.dtype == torch.float32:  # some are also kept transposed
        row_bytes = row_bytes * 5 // 3
    available = shared_memory(q.device) - _SCRATCH
    stages = (available // row_bytes - kept) // loaded
    return shape._replace(stages=max(min(shape.stages, stages), 0))


def count_tokens(rows: int, heads: int) -> int:
    """Return the queries of a program, with `heads` rows each: at least 16 rows."""
    return min(max(rows, 16, heads) // heads, MOST_QUERIES)


def _kernel_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides that a kernel takes. Those of lse (H, S) depend on the tokens, so they are
    passed times 16.
    """
    return x.stride() if x.dim() == 3 else multiply_by_16(x.stride())


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides,
    tokens, stops, starts, chosen, ranges, queries, first, keys, width, scale,
    COPIES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge into out and lse of a tile of queries."""
    group, begin, end, union = _tile(ranges, width)
    first_query = tl.program_id(0) * TOKENS
    query, token, head, there = tile_rows(tokens, first_query, queries, TOKENS, GROUP, HEADS)
    stop = tl.load(stops + token, mask=there, other=0).to(tl.int32)
    q_block = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)

    # The keys seen so far count as one more key. Its value is `out`.
    out_rows = address_rows(out, out_strides, token, head)
    lse_places = lse + head.to(tl.int64) * (lse_strides[0] // 16)
    lse_places += token.to(tl.int64) * (lse_strides[1] // 16)
    largest = tl.load(lse_places, mask=there, other=0.0) * LOG2_E
    weights = tl.where(largest == -INFINITY, 0.0, 1.0)
    sums = load_rows(out_rows, there & (largest != -INFINITY), D, WIDTH).to(tl.float32)
    for at in tl.range(begin, end):
        start = tl.load(starts + union + at)
        key = _keys(start, first, keys, BLOCK, N)
        seen = _seen(key, tl.load(chosen + union + at), query - first_query, stop)
        k_block = _load_block(k, k_strides, start, key, first, group, D, WIDTH, COPIES)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
        scores = tl.where(seen, scores, -INFINITY)
        probs, decay, weights, largest = weigh(scores, scale * LOG2_E, weights, largest)
        v_block = _load_block(v, v_strides, start, key, first, group, D, WIDTH, COPIES)
        sums = add_product(probs, v_block, sums * decay[:, None], PRECISION)

    changed = there & (weights != 0.0)
    store_rows(out_rows, sums / tl.where(changed, weights, 1.0)[:, None], changed, D, WIDTH)
    tl.store(lse_places, (largest + tl.log2(weights)) * LN_2, mask=changed)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _dq(
    q, k, v, dout, lse_delta, dq,
    q_strides, k_strides, v_strides, dout_strides, row_strides, dq_strides,
    tokens, stops, starts, chosen, ranges, queries, first, keys, width, scale,
    COPIES: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq of a tile of queries."""
    group, begin, end, union = _tile(ranges, width)
    first_query = tl.program_id(0) * TOKENS
    query, token, head, there = tile_rows(tokens, first_query, queries, TOKENS, GROUP, HEADS)
    stop = tl.load(stops + token, mask=there, other=0).to(tl.int32)
    q_block = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)
    dout_block = load_rows(address_rows(dout, dout_strides, token, head), there, D, WIDTH)
    rows = address_rows(lse_delta, row_strides, token, head)
    row_lse = tl.load(rows, mask=there, other=0.0)
    row_delta = tl.load(rows + 1, mask=there, other=0.0)

    sums = tl.zeros((TOKENS * HEADS, WIDTH), tl.float32)
    for at in tl.range(begin, end):
        start = tl.load(starts + union + at)
        key = _keys(start, first, keys, BLOCK, N)
        seen = _seen(key, tl.load(chosen + union + at), query - first_query, stop)
        k_block = _load_block(k, k_strides, start, key, first, group, D, WIDTH, COPIES)
        v_block = _load_block(v, v_strides, start, key, first, group, D, WIDTH, COPIES)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
        dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
        probs = _probs(scores, seen, row_lse[:, None], scale)
        dscores = (probs * (dprobs - row_delta[:, None])).to(k_block.dtype)
        sums = tl.dot(dscores, k_block, sums, input_precision=PRECISION)
    rows = address_rows(dq, dq_strides, token, head)
    store_rows(rows, load_rows(rows, there, D, WIDTH) + sums * scale, there, D, WIDTH)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _dkdv(
    q, k, v, dout, lse_delta, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, row_strides, dk_strides, dv_strides,
    stops, lists, starts, begins, ranges, slots, held, held_starts, reaches,
    first, keys, entries, most, slot_count, scale,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of blocks whose lists have one part. Hold the sums of other parts."""
    group = tl.program_id(1)
    row = tl.arange(0, TOKENS * HEADS)
    head = group * GROUP + row % HEADS
    lists += wide(group) * entries
    first_part, last_part = tl.load(ranges + 2 * group), tl.load(ranges + 2 * group + 1)
    for part in tl.range(first_part + tl.program_id(0), last_part, tl.num_programs(0)):
        start = tl.load(starts + group * most + part)
        key = _keys(start, first, keys, BLOCK, N)
        k_block = _load_keys(k, k_strides, key, first, group, D, WIDTH)
        v_block = _load_keys(v, v_strides, key, first, group, D, WIDTH)
        dk_sums = tl.zeros((N, WIDTH), tl.float32)
        dv_sums = tl.zeros((N, WIDTH), tl.float32)
        reach = tl.zeros((TOKENS * HEADS,), tl.int32)  # queries see no key from there on
        begin = tl.load(begins + group * (most + 1) + part)
        end = tl.load(begins + group * (most + 1) + part + 1)
        # Addresses depend on these numbers, so they are loaded a step ahead.
        next_there, next_token, next_stop, next_lse, next_delta = _load_list(
            lists, lse_delta, row_strides, stops, row, begin, end, head, HEADS, GROUP
        )
        for at in tl.range(begin, end, TOKENS):
            there, token, stop = next_there, next_token, next_stop
            row_lse, row_delta = next_lse, next_delta
            next_there, next_token, next_stop, next_lse, next_delta = _load_list(
                lists, lse_delta, row_strides, stops, row, at + TOKENS, end, head, HEADS, GROUP
            )
            reach = tl.maximum(reach, stop)
            q_block = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)
            dout_block = load_rows(address_rows(dout, dout_strides, token, head), there, D, WIDTH)
            # transposed, so that no product of the loop has to transpose them
            scores = tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION)
            probs = _probs(scores, key[:, None] < stop[None, :], row_lse[None, :], scale)
            dv_sums = add_product(probs, dout_block, dv_sums, PRECISION)
            dprobs = tl.dot(v_block, tl.trans(dout_block), input_precision=PRECISION)
            dscores = (probs * (dprobs - row_delta[None, :])).to(q_block.dtype)
            dk_sums = tl.dot(dscores, q_block, dk_sums, input_precision=PRECISION)
        reach = tl.max(reach, 0)
        slot = tl.load(slots + group * most + part)
        if slot < 0:
            _add_keys(dk, dk_strides, dk_sums * scale, key, reach, first, group, D, WIDTH)
            _add_keys(dv, dv_strides, dv_sums, key, reach, first, group, D, WIDTH)
        else:
            at_slot = group * slot_count + slot
            held_places = _held_places(held, at_slot, N, WIDTH)
            tl.store(held_places, dk_sums * scale)
            tl.store(held_places + N * WIDTH, dv_sums)
            tl.store(held_starts + at_slot, start)
            tl.store(reaches + at_slot, reach)


@triton.jit(do_not_specialize=_NUMBERS)
def _add_parts(
    held, starts, reaches, dk, dv, dk_strides, dv_strides, first, keys, slot_count,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of a block the sums of its parts, if this slot is the block's first."""
    slot, group = tl.program_id(0), tl.program_id(1)
    row = group * slot_count
    start = tl.load(starts + row + slot)
    before = tl.load(starts + row + slot - 1, mask=slot > 0, other=_NOWHERE)
    dk_sums = tl.zeros((N, WIDTH), tl.float32)
    dv_sums = tl.zeros((N, WIDTH), tl.float32)
    at, reach, is_part = slot, 0, (start != before) & (start != _NOWHERE)
    while is_part:
        held_places = _held_places(held, row + at, N, WIDTH)
        dk_sums += tl.load(held_places)
        dv_sums += tl.load(held_places + N * WIDTH)
        reach = tl.maximum(reach, tl.load(reaches + row + at))
        at += 1
        is_part = tl.load(starts + row + at, mask=at < slot_count, other=_NOWHERE) == start
    key = _keys(start, first, keys, BLOCK, N)
    _add_keys(dk, dk_strides, dk_sums, key, reach, first, group, D, WIDTH)
    _add_keys(dv, dv_strides, dv_sums, key, reach, first, group, D, WIDTH)


@triton.jit
def _probs(scores, seen, lse, scale):
    """Compute probabilities. All pairs of a query with an lse of -inf are hidden."""
    return tl.where(seen, tl.exp2(scores * (scale * LOG2_E) - lse * LOG2_E), 0.0)


@triton.jit
def _load_list(
    lists, lse_delta, strides, stops, row, at, end, head, HEADS: tl.constexpr, GROUP: tl.constexpr
):
    """Load a step of a list: whether each row is one, its query, stop, lse and delta."""
    place = at + row // HEADS
    there = (place < end) & (row % HEADS < GROUP)
    token = tl.load(lists + place, mask=there, other=0)
    stop = tl.load(stops + token, mask=there, other=0).to(tl.int32)
    rows = address_rows(lse_delta, strides, token, head)
    lse = tl.load(rows, mask=there, other=0.0)
    delta = tl.load(rows + 1, mask=there, other=0.0)
    return there, token, stop, lse, delta


@triton.jit
def _tile(ranges, width):
    """Return the program's kv head, the range of blocks in its union, and the union's offset."""
    group = tl.program_id(1)
    tile = group * tl.num_programs(0) + tl.program_id(0)
    return group, tl.load(ranges + 2 * tile), tl.load(ranges + 2 * tile + 1), wide(tile) * width


@triton.jit
def tile_rows(tokens, begin, end, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Return each row's query, token and head, and whether the query is one of begin .. end - 1."""
    row = tl.arange(0, TOKENS * HEADS)
    query = begin + row // HEADS
    there = (query < end) & (row % HEADS < GROUP)
    token = tl.load(tokens + query, mask=there, other=0)
    return query, token, tl.program_id(1) * GROUP + row % HEADS, there


@triton.jit
def _keys(start, first, keys, BLOCK: tl.constexpr, N: tl.constexpr):
    """Return the places of a block's keys: (N,), _NOWHERE for those that are not at hand."""
    nth = tl.arange(0, N)
    key = start + nth
    return tl.where((nth < BLOCK) & (key >= first) & (key < first + keys), key, _NOWHERE)


@triton.jit
def _seen(key, bits, nth, stop):
    """Return the visible pairs (M, N): keys before the row's stop, if its query chose the block."""
    limit = tl.where((bits >> nth) & 1 != 0, stop, 0)
    return key[None, :] < limit[:, None]


@triton.jit
def _load_block(
    x, strides, start, key, first, group, D: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr
):  # fmt: skip
    """Do what `_load_keys` does. With COPIES, x is described to the copy engine."""
    if COPIES:
        rows = x.load([start - first, group * D])
    else:
        rows = _load_keys(x, strides, key, first, group, D, WIDTH)
    return rows


@triton.jit
def _load_keys(x, strides, key, first, group, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of x (T, G, D): (N, WIDTH), zeros for keys that are not at hand."""
    there = key < _NOWHERE
    places = address_rows(x, strides, tl.where(there, key - first, 0), group)
    return load_rows(places, there, D, WIDTH)


@triton.jit
def _add_keys(x, strides, rows, key, reach, first, group, D: tl.constexpr, WIDTH: tl.constexpr):
    """Add rows (N, WIDTH) to x (T, G, D) for keys before `reach`. Later ones have other blocks."""
    there = key < reach
    places = address_rows(x, strides, tl.where(there, key - first, 0), group)
    store_rows(places, load_rows(places, there, D, WIDTH) + rows, there, D, WIDTH)


@triton.jit
def _held_places(held, slot, N: tl.constexpr, WIDTH: tl.constexpr):
    """Return the addresses (N, WIDTH) of dk in a slot. Those of dv come next."""
    at = held + wide(slot) * (2 * N * WIDTH)
    return at + tl.arange(0, N)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
