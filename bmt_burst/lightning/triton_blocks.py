"""The programs that `triton_kernel.py` launches.

A program goes through one piece of a segment in chunks of N tokens, in time or against it. Row i of
a chunk is its i-th token in that direction. So both directions have the same formulas, with decay
d = e^(-slope), the state S before the chunk and rows j <= i:

    out_i = scale * (sum_j d^(i - j) (q_i . k_j) v_j + d^(i + 1) S^T q_i)
    S    <- d^N S + sum_j d^(N - 1 - j) k_j v_j^T

Against time S is the gradient of the state after a token. It decays by one token less until it is
used and by one more until it is passed on, so AGAINST moves 1 from the first exponent to the other.

A program has all rows of a state and some of its columns, those of v and out. Letters: T tokens, H
heads, D head size, WIDTH the power of two that it is padded to, COLUMNS those of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.triton_memory import LOG2_E, address_rows, load_rows, store_rows, wide

_REACH = tl.constexpr(104.0)  # e^-104 is 0 in fp32


@triton.jit
def sum_pieces(
    k, v, k_strides, v_strides, slopes, spans, states, heads,
    AGAINST: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill the state after each piece, as if it began with 0. Tokens that decay to 0 are skipped.

    spans  (pieces, 2): first token, number of tokens
    """
    piece, head, left = _part(heads, D, COLUMNS)
    first = tl.load(spans + piece * 2)
    count = tl.load(spans + piece * 2 + 1)
    slope = tl.load(slopes + head)
    reach = tl.minimum(count, _REACH / tl.maximum(slope, 1e-6)).to(tl.int32)
    row = tl.arange(0, N)
    state = tl.zeros((WIDTH, COLUMNS), tl.float32)
    for at in tl.range((count - reach) // N * N, count, N):
        token, there = _tokens(first, at + row, count, AGAINST)
        k_rows = load_rows(address_rows(k, k_strides, token, head), there, D, WIDTH)
        v_rows = load_rows(address_rows(v, v_strides, token, head), there, D, COLUMNS, left)
        after = _decay(slope, tl.maximum(count - 1 - at - row, 0) + AGAINST)
        v_rows = (v_rows * after[:, None]).to(v_rows.dtype)
        state = tl.dot(tl.trans(k_rows), v_rows, state, input_precision=PRECISION)
    places, there = _state_places(states, piece, head, heads, left, False, D, WIDTH, COLUMNS)
    tl.store(places, state, mask=there)


@triton.jit
def chain_states(
    slopes, spans, chains, states, heads, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add to the state after each piece that after the piece before, decayed.

    A program has BLOCK of the SIZE entries of a state.

    chains  (segments, 2): first slot, end of the slots. There are at least two.
    """
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    head, chain = program // blocks % heads, program // blocks // heads
    entry = program % blocks * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(slopes + head)
    begin = tl.load(chains + chain * 2)
    end = tl.load(chains + chain * 2 + 1)
    places = states + (wide(begin) * heads + head) * SIZE + entry
    step = wide(heads) * SIZE
    state = tl.load(places, mask=entry < SIZE, other=0.0)
    own = tl.load(places + step, mask=entry < SIZE, other=0.0)
    for slot in tl.range(begin + 1, end):
        places += step
        # one piece ahead, so that programs need not wait for memory in each step
        later = tl.load(places + step, mask=entry < tl.where(slot + 1 < end, SIZE, 0), other=0.0)
        state = state * _decay(slope, tl.load(spans + slot * 2 + 1)) + own
        tl.store(places, state, mask=entry < SIZE)
        own = later


@triton.jit
def attend(
    q, k, v, out, q_strides, k_strides, v_strides, out_strides, slopes, pieces, states, edges,
    scale, heads, TRANSPOSED: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill out in time."""
    part = _part(heads, D, COLUMNS)
    _walk(
        q, k, v, out, q_strides, k_strides, v_strides, out_strides, slopes, pieces, states, edges,
        scale, heads, part, TRANSPOSED, 0, N, D, WIDTH, COLUMNS, PRECISION,
    )  # fmt: skip


@triton.jit
def attend_back(
    q, k, v, dout, dk, dv, q_strides, k_strides, v_strides, dout_strides, grad_strides,
    slopes, pieces, states, edges, scale, heads, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill dk and dv against time. Programs of both run side by side, so memory is read once for
    both. A piece has two numbers here.
    """
    piece, head, left = _part(heads, D, COLUMNS)
    part = piece // 2, head, left
    is_dk = piece % 2 == 0
    _walk(
        tl.where(is_dk, v, k), tl.where(is_dk, dout, q), tl.where(is_dk, q, dout),
        tl.where(is_dk, dk, dv), _pick(is_dk, v_strides, k_strides),
        _pick(is_dk, dout_strides, q_strides), _pick(is_dk, q_strides, dout_strides), grad_strides,
        slopes, pieces, states, edges, scale, heads, part, is_dk, 1,
        N, D, WIDTH, COLUMNS, PRECISION,
    )  # fmt: skip


@triton.jit
def _pick(condition, strides, others):
    return tl.where(condition, strides[0], others[0]), tl.where(condition, strides[1], others[1])


@triton.jit
def _walk(
    q, k, v, out, q_strides, k_strides, v_strides, out_strides, slopes, pieces, states, edges,
    scale, heads, part, transposed, AGAINST: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fill out of a part: a piece, a head, and the first column.

    pieces      (pieces, 5): first token, number of tokens, the slot in `states` of the state before
                the piece, the slot in `edges` of that at the segment's edge, and the tokens between
                this edge and the piece. A slot is -1 if the state is 0.
    transposed  whether states have the entries of v first
    """
    piece, head, left = part
    first = tl.load(pieces + piece * 5)
    count = tl.load(pieces + piece * 5 + 1)
    slot = tl.load(pieces + piece * 5 + 2)
    edge = tl.load(pieces + piece * 5 + 3)
    distance = tl.load(pieces + piece * 5 + 4)
    slope = tl.load(slopes + head)
    if transposed:
        state = _load_state(states, slot, head, heads, left, True, D, WIDTH, COLUMNS)
        initial = _load_state(edges, edge, head, heads, left, True, D, WIDTH, COLUMNS)
    else:
        state = _load_state(states, slot, head, heads, left, False, D, WIDTH, COLUMNS)
        initial = _load_state(edges, edge, head, heads, left, False, D, WIDTH, COLUMNS)
    state += initial * _decay(slope, distance)

    row = tl.arange(0, N)
    between = row[:, None] - row[None, :]
    # scaled before they are rounded, as q . k may not fit into fp16
    pairs = tl.where(between >= 0, _decay(slope, tl.maximum(between, 0)), 0.0) * scale
    before = _decay(slope, row + 1 - AGAINST) * scale
    after = _decay(slope, N - 1 - row + AGAINST)
    for at in tl.range(0, count, N):
        token, there = _tokens(first, at + row, count, AGAINST)
        q_rows = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)
        k_rows = load_rows(address_rows(k, k_strides, token, head), there, D, WIDTH)
        v_rows = load_rows(address_rows(v, v_strides, token, head), there, D, COLUMNS, left)
        scores = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION) * pairs
        sums = tl.dot(q_rows, state.to(q_rows.dtype), input_precision=PRECISION) * before[:, None]
        sums = tl.dot(scores.to(v_rows.dtype), v_rows, sums, input_precision=PRECISION)
        out_rows = address_rows(out, out_strides, token, head)
        store_rows(out_rows, sums, there, D, COLUMNS, left)
        # after the last chunk nothing reads the state, so that chunk may have fewer tokens
        decayed = (v_rows * after[:, None]).to(v_rows.dtype)
        state = tl.dot(
            tl.trans(k_rows), decayed, state * _decay(slope, N), input_precision=PRECISION
        )


@triton.jit
def _part(heads, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a program's piece, head and first column. Columns of a head read the same rows."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    return program // blocks // heads, program // blocks % heads, program % blocks * COLUMNS


@triton.jit
def _decay(slope, tokens):
    """Return e^(-slope * tokens). A slope may be 3e38, so the factor is of the tokens."""
    return tl.exp2(slope * (tokens * -LOG2_E))


@triton.jit
def _tokens(first, row, count, AGAINST: tl.constexpr):
    """Return the tokens of rows of a piece, and which of them exist."""
    token = first - row if AGAINST else first + row
    return token, row < count


@triton.jit
def _state_places(
    states, slot, head, heads, left, TRANSPOSED: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the addresses of a state (slots, H, D, D), and a mask of them: none of slot -1."""
    row = tl.arange(0, WIDTH)[:, None]
    column = left + tl.arange(0, COLUMNS)[None, :]
    place = column * D + row if TRANSPOSED else row * D + column
    there = (row < tl.where(slot < 0, 0, D)) & (column < D)
    return states + (wide(slot) * heads + head) * (D * D) + place, there


@triton.jit
def _load_state(
    states, slot, head, heads, left, TRANSPOSED: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    places, there = _state_places(states, slot, head, heads, left, TRANSPOSED, D, WIDTH, COLUMNS)
    return tl.load(places, mask=there, other=0.0)
