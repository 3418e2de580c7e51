"""The Triton kernels that `triton.py` launches: what one program computes.

A program has one block of queries, or of keys, of one sequence: its own side. It loops over the
blocks of the other side that share visible pairs with its block. The band splits these blocks into
three parts: blocks that its first edge cuts, blocks that are completely visible, and blocks that
its last edge or the end of the sequence cuts. Only the first and the last part are masked.

All attention kernels compute a pair of blocks with `scores_of`. Those of the backward continue with
`probs_of` and `dscores_of`. Exponents are to base 2.

An extension may add terms to scores, if TERMS. `terms` then has its tensors and these functions:

start   returns the state of a program, before its first block of the other side
add     adds the terms of a pair of blocks, to base 2, to scores. It also returns the state, and
        what `sum` takes of keys. A program passes all its pairs, in order
sum     adds the gradient of scores to the gradient of the terms, and returns the state
finish  adds the rest of the gradient

Letters: D is the head size, WIDTH the power of two that it is padded to. M and N are the numbers of
queries and keys of a block. CAP is the softcap of the scores, or None. `first` is the first token
of the program's block, `at` the first token of the other block, both counted in the sequence.
`more` is how many tokens more the other side of the sequence has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_memory import (
    INFINITY,
    LN_2,
    LOG2_E,
    load_lse,
    load_row,
    read,
    read_own,
    row_at,
    store,
    token_at,
)

# These numbers differ from call to call. Triton must not specialize on them: compiling a kernel
# again takes seconds. Strides of lse and delta differ, too, so they pass through `multiply_by_16`.
NUMBERS = ["left", "right"]
ROWS = ["lse", "delta"]  # (B, H, S) tensors that may begin at any address


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides,
    blocks, scale, left, right, terms,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    TERMS: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Fill out and lse of one block of queries and one head. GROUP query heads share a kv head."""
    head, batch = tl.program_id(1), tl.program_id(2)
    block = _block(blocks)
    first, q_start, q_count, kv_start, kv_count = block
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = read_own(q, q_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)

    # Without terms and a cap, scores get their factor only in the exponents.
    SCALED: tl.constexpr = CAP is not None or TERMS
    sums = tl.zeros((M, WIDTH), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -INFINITY, tl.float32)
    FIRST_PART: tl.constexpr = 2 if ONE_PART else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, ONE_PART)
    state = terms.start(terms, head, block, edges[FIRST_PART], M, N, False) if TERMS else ()
    for part in tl.static_range(FIRST_PART, 3):
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = read(k_rows, k_strides, at, columns, D, WIDTH, N, part != 1)
            scores = scores_of(q_block, k_block, scale, PRECISION, CAP, SCALED)
            factor = 1.0 if SCALED else scale * LOG2_E
            if TERMS:
                scores, state, _ = terms.add(terms, head, state, scores, at, columns, M, N, False)
            if part != 1:
                seen = visible_pairs(first, at, more, left, right, columns, M, N, LEFT, RIGHT)
                scores = tl.where(seen, scores, -INFINITY)
            probs, decay, weights, largest = weigh(scores, factor, weights, largest)
            v_block = read(v_rows, v_strides, at, columns, D, WIDTH, N, part != 1)
            sums = add_product(probs, v_block, sums * decay[:, None], PRECISION)

    # If all scores of a query are -inf, its weights are 0, and its out is NaN, as softmax's.
    seeing = _seeing(first, more, left, right, kv_count, M, LEFT, RIGHT)
    mean = sums / tl.where(seeing, weights, 1.0)[:, None]
    store(out, out_strides, batch, head, q_start + first, mean, rows, D, WIDTH, M)
    row = tl.arange(0, M)
    places = row_at(lse, lse_strides, batch, head, q_start + first) + row
    tl.store(places, (largest + tl.log2(weights)) * LN_2, mask=row < rows)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_kv(
    q, k, v, dout, lse, delta, dk, dv,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dk_strides, dv_strides, blocks, scale, left, right, terms,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    TERMS: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Fill dk and dv of one block of keys and one kv head. Scores are transposed for products."""
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    block = _block(blocks)
    first, kv_start, kv_count, q_start, q_count = block
    columns, more = tl.minimum(kv_count - first, N), q_count - kv_count
    k_block = read_own(k, k_strides, batch, kv_head, kv_start + first, columns, D, WIDTH, N)
    v_block = read_own(v, v_strides, batch, kv_head, kv_start + first, columns, D, WIDTH, N)

    dk_sums = tl.zeros((N, WIDTH), tl.float32)
    dv_sums = tl.zeros((N, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if ONE_PART else (0 if RIGHT else 1)
    edges = _edges(first, columns, more, right, left, q_count, M, RIGHT, LEFT, ONE_PART)
    for head in tl.range(kv_head * GROUP, kv_head * GROUP + GROUP):
        q_rows = token_at(q, q_strides, batch, head, q_start)
        dout_rows = token_at(dout, dout_strides, batch, head, q_start)
        lse_rows = row_at(lse, lse_strides, batch, head, q_start)
        delta_rows = row_at(delta, delta_strides, batch, head, q_start)
        state = terms.start(terms, head, block, edges[FIRST_PART], N, M, True) if TERMS else ()
        for part in tl.static_range(FIRST_PART, 3):
            for at in tl.range(edges[part], edges[part + 1], M):
                rows = q_count - at
                q_block = read(q_rows, q_strides, at, rows, D, WIDTH, M, part != 1)
                scores = scores_of(k_block, q_block, scale, PRECISION, CAP, True)
                if TERMS:
                    scores, state, _ = terms.add(terms, head, state, scores, at, rows, N, M, True)
                probs = probs_of(
                    scores, load_lse(lse_rows, at, rows, M)[None, :],
                    first, at, more, right, left, rows, N, M, RIGHT, LEFT, part != 1,
                )  # fmt: skip
                dout_block = read(dout_rows, dout_strides, at, rows, D, WIDTH, M, part != 1)
                dv_sums = add_product(probs, dout_block, dv_sums, PRECISION)
                dprobs = tl.dot(v_block, tl.trans(dout_block), input_precision=PRECISION)
                row_delta = load_row(delta_rows, at, rows, M)[None, :]
                dscores = dscores_of(scores, probs, dprobs, row_delta, CAP)
                dk_sums = add_product(dscores, q_block, dk_sums, PRECISION)

    at = kv_start + first
    store(dk, dk_strides, batch, kv_head, at, dk_sums * scale, columns, D, WIDTH, N)
    store(dv, dv_strides, batch, kv_head, at, dv_sums, columns, D, WIDTH, N)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ROWS)
def backward_q(
    q, k, v, dout, lse, delta, dq,
    q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dq_strides, blocks, scale, left, right, terms,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
    TERMS: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Fill dq of one block of queries and one head, unless it is None. Sum gradients of terms."""
    head, batch = tl.program_id(1), tl.program_id(2)
    block = _block(blocks)
    first, q_start, q_count, kv_start, kv_count = block
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = read_own(q, q_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    dout_block = read_own(dout, dout_strides, batch, head, q_start + first, rows, D, WIDTH, M)
    row_lse = load_lse(row_at(lse, lse_strides, batch, head, q_start + first), 0, rows, M)
    row_delta = load_row(row_at(delta, delta_strides, batch, head, q_start + first), 0, rows, M)
    k_rows = token_at(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = token_at(v, v_strides, batch, head // GROUP, kv_start)

    dq_sums = tl.zeros((M, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if ONE_PART else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, ONE_PART)
    state = terms.start(terms, head, block, edges[FIRST_PART], M, N, False) if TERMS else ()
    for part in tl.static_range(FIRST_PART, 3):
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = read(k_rows, k_strides, at, columns, D, WIDTH, N, part != 1)
            scores = scores_of(q_block, k_block, scale, PRECISION, CAP, True)
            if TERMS:
                scores, state, keys = terms.add(
                    terms, head, state, scores, at, columns, M, N, False
                )
            probs = probs_of(
                scores, row_lse[:, None],
                first, at, more, left, right, columns, M, N, LEFT, RIGHT, part != 1,
            )  # fmt: skip
            v_block = read(v_rows, v_strides, at, columns, D, WIDTH, N, part != 1)
            dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
            dscores = dscores_of(scores, probs, dprobs, row_delta[:, None], CAP)
            if dq is not None:
                dq_sums = add_product(dscores, k_block, dq_sums, PRECISION)
            if TERMS:
                state = terms.sum(terms, head, state, dscores, keys, M, N)
    if TERMS:
        terms.finish(terms, head, state, M)

    if dq is not None:
        store(dq, dq_strides, batch, head, q_start + first, dq_sums * scale, rows, D, WIDTH, M)


@triton.jit
def add_product(a, b, sums, PRECISION: tl.constexpr):
    """Return sums + a b, where a is cast to the dtype of b."""
    return tl.dot(a.to(b.dtype), b, sums, input_precision=PRECISION)


@triton.jit
def scores_of(
    own_block, other_block, scale,
    PRECISION: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Compute the scores (OWN, OTHER), to base 2, of two blocks (..., WIDTH). If not SCALED, they
    lack the factor scale log2(e) and have no cap.
    """
    scores = tl.dot(own_block, tl.trans(other_block), input_precision=PRECISION)
    if SCALED:
        if CAP is None:
            scores *= scale * LOG2_E
        else:
            scores = _tanh(scores * (scale / CAP)) * (CAP * LOG2_E)
    return scores


@triton.jit
def weigh(scores, factor, weights, largest):
    """Weigh scores (OWN, OTHER), to base 2 with a positive factor, against the largest so far.

    Return their weights, by what earlier sums shrink, and the new sum of weights and largest score.
    """
    now = tl.maximum(largest, tl.max(scores, 1) * factor)
    # A query that has seen no key yet has -inf, and -inf - -inf would be NaN.
    shift = tl.where(now == -INFINITY, 0.0, now)
    probs = tl.exp2(scores * factor - shift[:, None])
    decay = tl.exp2(largest - shift)
    return probs, decay, weights * decay + tl.sum(probs, 1), now


@triton.jit
def probs_of(
    scores, lse, first, at, more, low, high, others, OWN: tl.constexpr, OTHER: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities of scores (OWN, OTHER) from lse. If MASKED, hidden pairs are 0."""
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
    """Compute tanh, accurate to a few units in the last place."""
    square = x * x
    higher = 2 / 15 + square * (-17 / 315 + square * (62 / 2835))
    series = x + x * square * (-1 / 3 + square * higher)  # near 0 the other form loses its digits
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0))


@triton.jit
def _block(blocks):
    """Load this program's block: its first token, counted in its sequence, then start and length of
    the sequence on its own side, and on the other side.
    """
    at = blocks + tl.program_id(0) * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _edges(
    first, count, more, low, high, other_count,
    SIZE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ONE_PART: tl.constexpr,
):  # fmt: skip
    """Compute where the three parts of the other side begin, and where the last one ends.

    The parts together hold what tokens first .. first + count - 1 see. Token i sees token j if
    i + more - low <= j <= i + more + high; LOW and HIGH say which of the two bounds exist. Parts
    consist of whole blocks of SIZE tokens, except at the end of the last part. If ONE_PART, the
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
    if ONE_PART:
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
