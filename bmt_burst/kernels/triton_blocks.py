"""The Triton kernels that `triton.py` launches: what one program computes.

A program has one block of queries, or of keys, of one sequence: its own side. It loops over the
blocks of the other side that share visible pairs with its block. The band splits these blocks into
three parts: blocks that its first edge cuts, blocks that are completely visible, and blocks that
its last edge or the end of the sequence cuts. Only the first and the last part are masked.

All attention kernels compute a pair of blocks with `scores_of`. Those of the backward continue with
`probs_of` and `dscores_of`. Exponents are to base 2, and so are the terms of a bias.

Letters: D is the head size, WIDTH the power of two that it is padded to. M and N are the numbers of
queries and keys of a block. CAP is the softcap of the scores, or None. `first` is the first token
of the program's block, `at` the first token of the other block, both counted in the sequence.
`more` is how many tokens more the other side of the sequence has.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The seam: what an extension adds to scores, in the branches of the constant BIAS. Without one it
# is NONE, and Triton compiles none of it.
from ..bias.kernels.triton_terms import (
    BY_DISTANCE,
    BY_SEGMENTS,
    NONE,
    add_by_segments,
    add_near,
    add_waiting,
    by_distance,
    by_segments,
    distances_of,
    kv_fields,
    q_fields,
)
from .triton_memory import (
    INFINITY,
    LOG2_E,
    load_lse,
    load_row,
    read,
    read_own,
    row_at,
    skip,
    store,
    token_at,
)

_LN_2 = tl.constexpr(0.6931471805599453)

# These numbers differ from call to call. Triton must not specialize on them: compiling a kernel
# again takes seconds. Strides of lse and delta differ, too, so they pass through `multiply_by_16`.
NUMBERS = ["left", "right"]
ROWS = ["lse", "delta"]  # (B, H, S) tensors that may begin at any address


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides,
    blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Fill out and lse of one block of queries and one head. GROUP query heads share a kv head."""
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_start, q_count, kv_start, kv_count = _block(blocks)
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = read_own(q, q_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)
    if BIAS == NONE:
        own = None
    if BIAS == BY_SEGMENTS:
        own = q_fields(bias, q_start + first, rows, M)
    if BIAS == BY_DISTANCE:
        places = distances_of(bias, q_start, q_count, kv_start, kv_count)

    # Without a bias and a cap, scores get their factor only in the exponents.
    SCALED: tl.constexpr = CAP is not None or BIAS != NONE
    sums = tl.zeros((M, WIDTH), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -INFINITY, tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, BIAS == BY_SEGMENTS)
    for part in tl.static_range(FIRST_PART, 3):
        if BIAS == BY_DISTANCE:
            own = by_distance(bias, head, places, first, edges[part], M, N, False)
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = read(skip(k_rows, k_strides, at), k_strides, columns, D, WIDTH, N, part != 1)
            scores, _ = scores_of(
                q_block, k_block, own, bias, head, kv_start + at, columns, scale,
                N, BIAS, False, PRECISION, CAP, SCALED,
            )  # fmt: skip
            factor = 1.0 if SCALED else scale * LOG2_E
            if BIAS == BY_DISTANCE:  # loads the next block's terms while this one is computed
                own = by_distance(bias, head, places, first, at + N, M, N, False)
            if part != 1:
                seen = visible_pairs(first, at, more, left, right, columns, M, N, LEFT, RIGHT)
                scores = tl.where(seen, scores, -INFINITY)
            now = tl.maximum(largest, tl.max(scores, 1) * factor)
            # A query that has seen no key yet has -inf, and -inf - -inf would be NaN.
            shift = tl.where(now == -INFINITY, 0.0, now)
            probs = tl.exp2(scores * factor - shift[:, None])
            decay = tl.exp2(largest - shift)
            weights = weights * decay + tl.sum(probs, 1)
            v_block = read(skip(v_rows, v_strides, at), v_strides, columns, D, WIDTH, N, part != 1)
            sums = tl.dot(
                probs.to(v_block.dtype), v_block, sums * decay[:, None], input_precision=PRECISION
            )
            largest = now

    # If all scores of a query are -inf, its weights are 0, and its out is NaN, as softmax's.
    seeing = _seeing(first, more, left, right, kv_count, M, LEFT, RIGHT)
    mean = sums / tl.where(seeing, weights, 1.0)[:, None]
    store(out, out_strides, batch, head, q_start + first, mean, rows, D, WIDTH, M)
    row = tl.arange(0, M)
    places = row_at(lse, lse_strides, batch, head, q_start + first) + row
    tl.store(places, (largest + tl.log2(weights)) * _LN_2, mask=row < rows)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_kv(
    q, k, v, dout, lse, delta, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dk_strides, dv_strides, blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Fill dk and dv of one block of keys and one kv head.

    Scores are transposed, so that no product of the loop has to transpose them.
    """
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    first, kv_start, kv_count, q_start, q_count = _block(blocks)
    columns, more = tl.minimum(kv_count - first, N), q_count - kv_count
    k_block = read_own(k, k_strides, batch, kv_head, kv_start + first, columns, D, WIDTH, N)
    v_block = read_own(v, v_strides, batch, kv_head, kv_start + first, columns, D, WIDTH, N)
    if BIAS == NONE:
        own = None
    if BIAS == BY_SEGMENTS:
        own = kv_fields(bias, kv_start + first, columns, N)
    if BIAS == BY_DISTANCE:
        places = distances_of(bias, q_start, q_count, kv_start, kv_count)

    dk_sums = tl.zeros((N, WIDTH), tl.float32)
    dv_sums = tl.zeros((N, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if RIGHT else 1)
    edges = _edges(first, columns, more, right, left, q_count, M, RIGHT, LEFT, BIAS == BY_SEGMENTS)
    for head in tl.range(kv_head * GROUP, kv_head * GROUP + GROUP):
        q_rows = token_at(q, q_strides, batch, head, q_start)
        dout_rows = token_at(dout, dout_strides, batch, head, q_start)
        lse_rows = row_at(lse, lse_strides, batch, head, q_start)
        delta_rows = row_at(delta, delta_strides, batch, head, q_start)
        for part in tl.static_range(FIRST_PART, 3):
            if BIAS == BY_DISTANCE:
                own = by_distance(bias, head, places, edges[part], first, M, N, True)
            for at in tl.range(edges[part], edges[part + 1], M):
                rows = q_count - at
                q_block = read(skip(q_rows, q_strides, at), q_strides, rows, D, WIDTH, M, part != 1)
                scores, _ = scores_of(
                    k_block, q_block, own, bias, head, q_start + at, rows, scale,
                    M, BIAS, True, PRECISION, CAP, True,
                )  # fmt: skip
                if BIAS == BY_DISTANCE:
                    own = by_distance(bias, head, places, at + M, first, M, N, True)
                probs = probs_of(
                    scores, load_lse(lse_rows, at, rows, M)[None, :],
                    first, at, more, right, left, rows, N, M, RIGHT, LEFT, part != 1,
                )  # fmt: skip
                dout_at = skip(dout_rows, dout_strides, at)
                dout_block = read(dout_at, dout_strides, rows, D, WIDTH, M, part != 1)
                dv_sums = tl.dot(
                    probs.to(q_block.dtype), dout_block, dv_sums, input_precision=PRECISION
                )
                dprobs = tl.dot(v_block, tl.trans(dout_block), input_precision=PRECISION)
                dscores = dscores_of(
                    scores, probs, dprobs, load_row(delta_rows, at, rows, M)[None, :], CAP
                )
                dk_sums = tl.dot(
                    dscores.to(q_block.dtype), q_block, dk_sums, input_precision=PRECISION
                )

    at = kv_start + first
    store(dk, dk_strides, batch, kv_head, at, dk_sums * scale, columns, D, WIDTH, N)
    store(dv, dv_strides, batch, kv_head, at, dv_sums, columns, D, WIDTH, N)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_q(
    q, k, v, dout, lse, delta, dq,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dq_strides, blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Fill dq of one block of queries and one head, unless dq is None.

    With a bias by segments also add the block's share to the gradient of the bias.
    """
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_start, q_count, kv_start, kv_count = _block(blocks)
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = read_own(q, q_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    dout_block = read_own(dout, dout_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    row_lse = load_lse(row_at(lse, lse_strides, batch, head, q_start + first), 0, rows, M)
    row_delta = load_row(row_at(delta, delta_strides, batch, head, q_start + first), 0, rows, M)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)
    if BIAS == NONE:
        own = None
    if BIAS == BY_SEGMENTS:
        own = q_fields(bias, q_start + first, rows, M)
        waiting, group, segment = tl.zeros((M,), tl.float32), 0, 0
    if BIAS == BY_DISTANCE:
        places = distances_of(bias, q_start, q_count, kv_start, kv_count)

    dq_sums = tl.zeros((M, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, BIAS == BY_SEGMENTS)
    for part in tl.static_range(FIRST_PART, 3):
        if BIAS == BY_DISTANCE:
            own = by_distance(bias, head, places, first, edges[part], M, N, False)
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = read(skip(k_rows, k_strides, at), k_strides, columns, D, WIDTH, N, part != 1)
            scores, keys = scores_of(
                q_block, k_block, own, bias, head, kv_start + at, columns, scale,
                N, BIAS, False, PRECISION, CAP, True,
            )  # fmt: skip
            if BIAS == BY_DISTANCE:
                own = by_distance(bias, head, places, first, at + N, M, N, False)
            probs = probs_of(
                scores, row_lse[:, None],
                first, at, more, left, right, columns, M, N, LEFT, RIGHT, part != 1,
            )  # fmt: skip
            v_block = read(skip(v_rows, v_strides, at), v_strides, columns, D, WIDTH, N, part != 1)
            dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
            dscores = dscores_of(scores, probs, dprobs, row_delta[:, None], CAP)
            if dq is not None:
                dq_sums = tl.dot(
                    dscores.to(k_block.dtype), k_block, dq_sums, input_precision=PRECISION
                )
            if BIAS == BY_SEGMENTS:
                if keys.uniform:
                    if (keys.group != group) | (keys.segment != segment):
                        add_waiting(bias, head, waiting, own, group, segment, M)
                        waiting = tl.zeros((M,), tl.float32)
                        group, segment = keys.group, keys.segment
                    waiting += add_near(bias, head, dscores, own, keys, M)
                else:
                    add_by_segments(bias, head, dscores, own, keys, M, N)
    if BIAS == BY_SEGMENTS:
        add_waiting(bias, head, waiting, own, group, segment, M)

    if dq is not None:
        store(dq, dq_strides, batch, head, q_start + first, dq_sums * scale, rows, D, WIDTH, M)


@triton.jit
def scores_of(
    own_block, other_block, own, bias, head, other_first, others, scale, OTHER: tl.constexpr,
    BIAS: tl.constexpr, TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Compute the scores, to base 2, of a program's own tokens and OTHER tokens of the other side.

    own_block    (OWN, WIDTH): the program's queries or, if TRANSPOSED, its keys
    other_block  (OTHER, WIDTH): tokens other_first .. of the other side, and zeros after `others`
    own          BY_DISTANCE (OWN, OTHER): the terms of the bias for this pair of blocks;
                 BY_SEGMENTS: the fields of the program's own tokens; None without a bias

    Return scores (OWN, OTHER) and the fields of the other tokens; these are () unless
    BY_SEGMENTS. Scores that are not SCALED lack the factor scale log2(e); they have no bias and no
    cap.
    """
    scores = tl.dot(own_block, tl.trans(other_block), input_precision=PRECISION)
    if SCALED:
        if CAP is None:
            scores *= scale * LOG2_E
        else:
            scores = _tanh(scores * (scale / CAP)) * (CAP * LOG2_E)
    other = ()
    if BIAS == BY_DISTANCE:
        scores += own
    if BIAS == BY_SEGMENTS:
        if TRANSPOSED:
            other = q_fields(bias, other_first, tl.minimum(others, OTHER), OTHER)
            scores += by_segments(bias, head, other, own, True)
        else:
            other = kv_fields(bias, other_first, tl.minimum(others, OTHER), OTHER)
            scores += by_segments(bias, head, own, other, False)
    return scores, other


@triton.jit
def probs_of(
    scores, lse, first, at, more, low, high, others, OWN: tl.constexpr, OTHER: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities of scores (OWN, OTHER) from lse, which broadcasts.

    If MASKED, hidden pairs are 0; see `visible_pairs`.
    """
    probs = tl.exp2(scores - lse)
    if MASKED:
        seen = visible_pairs(first, at, more, low, high, others, OWN, OTHER, LOW, HIGH)
        probs = tl.where(seen, probs, 0.0)
    return probs


@triton.jit
def dscores_of(scores, probs, dprobs, delta, CAP: tl.constexpr):
    """Compute the gradient of scores without their cap from the gradient of the probabilities."""
    dscores = probs * (dprobs - delta)
    if CAP is not None:
        tanh = scores * (1.0 / (CAP * LOG2_E))  # scores are to base 2
        dscores *= 1.0 - tanh * tanh
    return dscores


@triton.jit
def _tanh(x):
    """Compute tanh, accurate to a few units in the last place.

    Near 0 use the series, because 1 - 2 / (e^2x + 1) loses its digits there.
    """
    square = x * x
    series = x + x * square * (
        -1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))
    )
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def _block(blocks):
    """Load this program's block.

    Return its first token, counted in its sequence, then start and length of the sequence on its
    own side, then start and length on the other side.
    """
    at = blocks + tl.program_id(0) * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _edges(
    first, count, more, low, high, other_count,
    SIZE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ALL_MASKED: tl.constexpr,
):  # fmt: skip
    """Compute where the three parts of the other side begin, and where the last one ends.

    The parts together hold what tokens first .. first + count - 1 see. Token i sees token j if
    i + more - low <= j <= i + more + high; LOW and HIGH say which of the two bounds exist. Parts
    consist of whole blocks of SIZE tokens, except at the end of the last part. If ALL_MASKED, the
    last part has all blocks.
    """
    begin, whole, end, stop = 0, 0, other_count // SIZE * SIZE, other_count
    if LOW:
        begin = tl.maximum(first + more - low, 0) // SIZE * SIZE
        whole = tl.cdiv(tl.maximum(first + count - 1 + more - low, 0), SIZE) * SIZE
    if HIGH:
        end = tl.minimum(end, tl.maximum(first + more + high + 1, 0) // SIZE * SIZE)
        stop = tl.minimum(stop, first + count + more + high)
    # If no block is completely visible, the first part ends where the last one begins.
    whole = tl.minimum(whole, tl.cdiv(tl.maximum(stop, 0), SIZE) * SIZE)
    middle = tl.maximum(whole, end)
    if ALL_MASKED:
        whole = begin
        middle = begin
    return begin, whole, middle, stop


@triton.jit
def visible_pairs(
    first, at, more, low, high, others,
    OWN: tl.constexpr, OTHER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Return which pairs (OWN, OTHER) are visible.

    These are OWN tokens from `first` on and OTHER tokens of the other side from `at` on. From
    there, the other side has `others` tokens. `_edges` explains the band.
    """
    other = tl.arange(0, OTHER)[None, :]
    ahead = other - tl.arange(0, OWN)[:, None] + (at - first - more)
    result = tl.broadcast_to(other < others, (OWN, OTHER))
    if LOW:
        result &= ahead >= -low
    if HIGH:
        result &= ahead <= high
    return result


@triton.jit
def _seeing(
    first, more, left, right, kv_count, M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Return (M,): whether each of the queries first .. sees any key."""
    middle = first + more + tl.arange(0, M)
    lowest = tl.zeros((M,), tl.int32)
    highest = lowest + kv_count - 1
    if LEFT:
        lowest = tl.maximum(lowest, middle - left)
    if RIGHT:
        highest = tl.minimum(highest, middle + right)
    return lowest <= highest
