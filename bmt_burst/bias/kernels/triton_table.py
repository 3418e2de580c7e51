"""The Triton kernel that computes the gradient of a bias by distance.

Its programs follow diagonals, along which distances are equal.

`kernels/triton_blocks.py` explains the letters, and has what this kernel shares with others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.triton_blocks import NUMBERS, ROWS, dscores_of, probs_of, scores_of, visible_pairs
from ...kernels.triton_memory import load_lse, load_row, read, row_at, token_at, wide
from .triton_terms import add_by_distance, by_distance, first_distance


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_table(
    q, k, v, dout, lse, delta,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    walks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    TERMS: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Add the share of the blocks along one diagonal to the gradient of a bias by distance.

    All its blocks have the same distances. So dscores are summed over the blocks, and the sums are
    added once.
    """
    head, batch, walk = tl.program_id(1), tl.program_id(2), walks + tl.program_id(0) * 7
    start, steps, ahead = tl.load(walk), tl.load(walk + 1), tl.load(walk + 2)
    q_start, q_count = tl.load(walk + 3), tl.load(walk + 4)
    kv_start, kv_count = tl.load(walk + 5), tl.load(walk + 6)
    more = kv_count - q_count
    q_rows = token_at(q, q_strides, batch, head, q_start)
    dout_rows = token_at(dout, dout_strides, batch, head, q_start)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)
    lse_rows = row_at(lse, lse_strides, batch, head, q_start)
    delta_rows = row_at(delta, delta_strides, batch, head, q_start)
    apart = first_distance(bias, q_start, q_count, kv_start, kv_count)
    added = by_distance(bias, head, apart, start, start + ahead, M, N, False)
    sums = tl.zeros((M, N), tl.float32)
    for first in tl.range(start, start + steps * M, M):
        at = first + ahead  # the first key, which may be before the sequence
        rows, columns = q_count - first, kv_count - at
        q_block = read(q_rows, q_strides, first, rows, D, WIDTH, M, True)
        k_block = _load_between(k_rows, k_strides, at, columns, D, WIDTH, N)
        scores = scores_of(q_block, k_block, scale, PRECISION, CAP, True) + added
        probs = probs_of(
            scores, load_lse(lse_rows, first, rows, M)[:, None],
            first, at, more, left, right, columns, M, N, LEFT, RIGHT, False,
        )  # fmt: skip
        dout_block = read(dout_rows, dout_strides, first, rows, D, WIDTH, M, True)
        v_block = _load_between(v_rows, v_strides, at, columns, D, WIDTH, N)
        dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
        dscores = dscores_of(
            scores, probs, dprobs, load_row(delta_rows, first, rows, M)[:, None], CAP
        )
        seen = visible_pairs(first, at, more, left, right, columns, M, N, LEFT, RIGHT) & (
            tl.arange(0, N)[None, :] >= -at
        )
        sums += tl.where(seen & (tl.arange(0, M)[:, None] < rows), dscores, 0.0)
    between = tl.arange(0, N)[None, :] - tl.arange(0, M)[:, None]
    add_by_distance(bias, head, sums, apart + ahead + between)


@triton.jit
def _load_between(
    at, strides, first, count, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """Load SIZE tokens, `first` tokens after the address `at`: (SIZE, WIDTH).

    Tokens before `at`, tokens after `count` and columns after D are 0.
    """
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    there = (token >= -first) & (token < count)
    places = at + wide(first) * strides[1] + token * strides[1] + column
    return tl.load(places, mask=there & (column < D), other=0.0)
