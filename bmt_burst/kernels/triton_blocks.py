"""The Triton kernels of `triton.py`: what a program computes of a block.

A program has a block of queries, or of keys, of one sequence, and goes through the blocks of the other side that it
sees or that see it. The band splits these in three: blocks cut by its one edge, blocks that are visible whole, and
blocks cut by its other edge or by the sequence's end. Only the outer ones are masked. Exponents are to base 2, and so
is the bias.

Letters: D head size, WIDTH the power of two that it is padded to; M queries and N keys of a block; CAP the softcap of
the scores, None for none.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_INFINITY = tl.constexpr(float("inf"))

# What BIAS says of a call's biases. Pairs that go by distance alone are many; the others are few.
NONE = tl.constexpr(0)
BY_DISTANCE = tl.constexpr(1)
BY_SEGMENTS = tl.constexpr(2)

# These differ from call to call: a kernel compiled anew for each kind of number would take seconds. Strides of lse and
# delta, which do too, come `of_one_kind`.
_NUMBERS = ["left", "right"]
_ROWS = ["lse", "delta"]  # numbers of tokens, which may begin anywhere

_FEW_ROWS = tl.constexpr(48)  # of a table: to sum a block's pairs of each is faster than to add each pair


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def forward(
    q, k, v, out, lse, q_strides, k_strides, v_strides, out_strides, lse_strides, blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Fills out and lse of a block of queries of one head. GROUP query heads share a kv head."""
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_start, q_count, kv_start, kv_count = _block(blocks)
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = _load(_token(q, q_strides, batch, head, q_start + first), q_strides, rows, D, WIDTH, M, True)
    k_rows = _token(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = _token(v, v_strides, batch, head // GROUP, kv_start)
    if BIAS == BY_SEGMENTS:
        queries = _q_fields(bias, q_start + first, rows, M)
    if BIAS == BY_DISTANCE:
        places = _distances(bias, q_start, q_count, kv_start, kv_count)

    sums = tl.zeros((M, WIDTH), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -_INFINITY, tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, BIAS == BY_SEGMENTS)
    for part in tl.static_range(FIRST_PART, 3):
        if BIAS == BY_DISTANCE:
            added = _by_distance(bias, head, places, first, edges[part], M, N, False)
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = _load(_ahead(k_rows, k_strides, at), k_strides, columns, D, WIDTH, N, part != 1)
            scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION)
            factor = scale * _LOG2_E
            if CAP is not None:
                scores = _scores(scores, scale, CAP)
                factor = 1.0
            if BIAS == BY_SEGMENTS:
                keys = _kv_fields(bias, kv_start + at, tl.minimum(columns, N), N)
                scores = scores * factor + _bias(bias, head, queries, keys, False)
                factor = 1.0
            if BIAS == BY_DISTANCE:  # the next block's numbers come while this one is computed
                scores = scores * factor + added
                added = _by_distance(bias, head, places, first, at + N, M, N, False)
                factor = 1.0
            if part != 1:
                seen = _visible(first, at, more, left, right, columns, M, N, LEFT, RIGHT)
                scores = tl.where(seen, scores, -_INFINITY)
            now = tl.maximum(largest, tl.max(scores, 1) * factor)
            shift = tl.where(now == -_INFINITY, 0.0, now)
            probs = tl.exp2(scores * factor - shift[:, None])
            decay = tl.exp2(largest - shift)
            weights = weights * decay + tl.sum(probs, 1)
            v_block = _load(_ahead(v_rows, v_strides, at), v_strides, columns, D, WIDTH, N, part != 1)
            sums = tl.dot(probs.to(v_block.dtype), v_block, sums * decay[:, None], input_precision=PRECISION)
            largest = now

    # Who sees keys, all with a score of -inf, has weights of 0 and, as softmax says, an out of NaN.
    seeing = _seeing(first, more, left, right, kv_count, M, LEFT, RIGHT)
    out_rows = _token(out, out_strides, batch, head, q_start + first)
    _store(out_rows, out_strides, sums / tl.where(seeing, weights, 1.0)[:, None], rows, D, WIDTH, M)
    row = tl.arange(0, M)
    places = _row(lse, lse_strides, batch, head, q_start + first) + row
    tl.store(places, (largest + tl.log2(weights)) * _LN_2, mask=row < rows)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def backward_kv(
    q, k, v, dout, lse, delta, dk, dv, q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dk_strides, dv_strides, blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Fills dk and dv of a block of keys of one kv head. Scores are transposed, so that no product has to transpose."""
    kv_head, batch = tl.program_id(1), tl.program_id(2)
    first, kv_start, kv_count, q_start, q_count = _block(blocks)
    columns, more = tl.minimum(kv_count - first, N), q_count - kv_count
    k_block = _load(_token(k, k_strides, batch, kv_head, kv_start + first), k_strides, columns, D, WIDTH, N, True)
    v_block = _load(_token(v, v_strides, batch, kv_head, kv_start + first), v_strides, columns, D, WIDTH, N, True)
    if BIAS == BY_SEGMENTS:
        keys = _kv_fields(bias, kv_start + first, columns, N)
    if BIAS == BY_DISTANCE:
        places = _distances(bias, q_start, q_count, kv_start, kv_count)

    dk_sums = tl.zeros((N, WIDTH), tl.float32)
    dv_sums = tl.zeros((N, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if RIGHT else 1)
    edges = _edges(first, columns, more, right, left, q_count, M, RIGHT, LEFT, BIAS == BY_SEGMENTS)
    for head in tl.range(kv_head * GROUP, kv_head * GROUP + GROUP):
        q_rows = _token(q, q_strides, batch, head, q_start)
        dout_rows = _token(dout, dout_strides, batch, head, q_start)
        lse_rows = _row(lse, lse_strides, batch, head, q_start)
        delta_rows = _row(delta, delta_strides, batch, head, q_start)
        for part in tl.static_range(FIRST_PART, 3):
            if BIAS == BY_DISTANCE:
                added = _by_distance(bias, head, places, edges[part], first, M, N, True)
            for at in tl.range(edges[part], edges[part + 1], M):
                rows = q_count - at
                q_block = _load(_ahead(q_rows, q_strides, at), q_strides, rows, D, WIDTH, M, part != 1)
                scores = _scores(tl.dot(k_block, tl.trans(q_block), input_precision=PRECISION), scale, CAP)
                if BIAS == BY_SEGMENTS:
                    queries = _q_fields(bias, q_start + at, tl.minimum(rows, M), M)
                    scores += _bias(bias, head, queries, keys, True)
                if BIAS == BY_DISTANCE:
                    scores += added
                    added = _by_distance(bias, head, places, at + M, first, M, N, True)
                probs = tl.exp2(scores - _load_lse(lse_rows, at, rows, M)[None, :])
                if part != 1:
                    seen = _visible(first, at, more, right, left, rows, N, M, RIGHT, LEFT)
                    probs = tl.where(seen, probs, 0.0)
                dout_block = _load(_ahead(dout_rows, dout_strides, at), dout_strides, rows, D, WIDTH, M, part != 1)
                dv_sums = tl.dot(probs.to(q_block.dtype), dout_block, dv_sums, input_precision=PRECISION)
                dprobs = tl.dot(v_block, tl.trans(dout_block), input_precision=PRECISION)
                dscores = probs * (dprobs - _load_row(delta_rows, at, rows, M)[None, :])
                if CAP is not None:
                    dscores *= _slope(scores, CAP)
                dk_sums = tl.dot(dscores.to(q_block.dtype), q_block, dk_sums, input_precision=PRECISION)

    dk_rows = _token(dk, dk_strides, batch, kv_head, kv_start + first)
    dv_rows = _token(dv, dv_strides, batch, kv_head, kv_start + first)
    _store(dk_rows, dk_strides, dk_sums * scale, columns, D, WIDTH, N)
    _store(dv_rows, dv_strides, dv_sums, columns, D, WIDTH, N)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def backward_q(
    q, k, v, dout, lse, delta, dq, q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    dq_strides, blocks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Fills dq, unless it is None, of a block of queries of one head, and adds to the sums of a bias by segments."""
    head, batch = tl.program_id(1), tl.program_id(2)
    first, q_start, q_count, kv_start, kv_count = _block(blocks)
    rows, more = tl.minimum(q_count - first, M), kv_count - q_count
    q_block = _load(_token(q, q_strides, batch, head, q_start + first), q_strides, rows, D, WIDTH, M, True)
    dout_rows = _token(dout, dout_strides, batch, head, q_start + first)
    dout_block = _load(dout_rows, dout_strides, rows, D, WIDTH, M, True)
    row_lse = _load_lse(_row(lse, lse_strides, batch, head, q_start + first), 0, rows, M)
    row_delta = _load_row(_row(delta, delta_strides, batch, head, q_start + first), 0, rows, M)
    k_rows = _token(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = _token(v, v_strides, batch, head // GROUP, kv_start)
    if BIAS == BY_SEGMENTS:
        queries = _q_fields(bias, q_start + first, rows, M)
        waiting, group, segment = tl.zeros((M,), tl.float32), 0, 0
    if BIAS == BY_DISTANCE:
        places = _distances(bias, q_start, q_count, kv_start, kv_count)

    dq_sums = tl.zeros((M, WIDTH), tl.float32)
    FIRST_PART: tl.constexpr = 2 if BIAS == BY_SEGMENTS else (0 if LEFT else 1)
    edges = _edges(first, rows, more, left, right, kv_count, N, LEFT, RIGHT, BIAS == BY_SEGMENTS)
    for part in tl.static_range(FIRST_PART, 3):
        if BIAS == BY_DISTANCE:
            added = _by_distance(bias, head, places, first, edges[part], M, N, False)
        for at in tl.range(edges[part], edges[part + 1], N):
            columns = kv_count - at
            k_block = _load(_ahead(k_rows, k_strides, at), k_strides, columns, D, WIDTH, N, part != 1)
            scores = _scores(tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION), scale, CAP)
            if BIAS == BY_SEGMENTS:
                keys = _kv_fields(bias, kv_start + at, tl.minimum(columns, N), N)
                scores += _bias(bias, head, queries, keys, False)
            if BIAS == BY_DISTANCE:
                scores += added
                added = _by_distance(bias, head, places, first, at + N, M, N, False)
            probs = tl.exp2(scores - row_lse[:, None])
            if part != 1:
                seen = _visible(first, at, more, left, right, columns, M, N, LEFT, RIGHT)
                probs = tl.where(seen, probs, 0.0)
            v_block = _load(_ahead(v_rows, v_strides, at), v_strides, columns, D, WIDTH, N, part != 1)
            dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
            dscores = probs * (dprobs - row_delta[:, None])
            if CAP is not None:
                dscores *= _slope(scores, CAP)
            if dq is not None:
                dq_sums = tl.dot(dscores.to(k_block.dtype), k_block, dq_sums, input_precision=PRECISION)
            if BIAS == BY_SEGMENTS:
                if keys.alike:
                    if (keys.group != group) | (keys.segment != segment):
                        _add_waiting(bias, head, waiting, queries, group, segment, M)
                        waiting, group, segment = tl.zeros((M,), tl.float32), keys.group, keys.segment
                    waiting += _add_near(bias, head, dscores, queries, keys, M)
                else:
                    _add_to_table(bias, head, dscores, queries, keys, M, N)
    if BIAS == BY_SEGMENTS:
        _add_waiting(bias, head, waiting, queries, group, segment, M)

    if dq is not None:
        dq_rows = _token(dq, dq_strides, batch, head, q_start + first)
        _store(dq_rows, dq_strides, dq_sums * scale, rows, D, WIDTH, M)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def backward_table(
    q, k, v, dout, lse, delta, q_strides, k_strides, v_strides, dout_strides, lse_strides, delta_strides,
    walks, scale, left, right, bias,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Adds to the sums of a bias that goes by distance, for blocks of one head along a diagonal.

    If positions are EVEN, distances are the same in all blocks, and dscores are summed before they are added.
    Sequences of the other kind are left alone.
    """
    head, batch, walk = tl.program_id(1), tl.program_id(2), walks + tl.program_id(0) * 7
    start, steps, ahead = tl.load(walk), tl.load(walk + 1), tl.load(walk + 2)
    q_start, q_count, kv_start, kv_count = tl.load(walk + 3), tl.load(walk + 4), tl.load(walk + 5), tl.load(walk + 6)
    more = kv_count - q_count
    q_rows = _token(q, q_strides, batch, head, q_start)
    dout_rows = _token(dout, dout_strides, batch, head, q_start)
    k_rows = _token(k, k_strides, batch, head // GROUP, kv_start)
    v_rows = _token(v, v_strides, batch, head // GROUP, kv_start)
    lse_rows = _row(lse, lse_strides, batch, head, q_start)
    delta_rows = _row(delta, delta_strides, batch, head, q_start)
    places = _distances(bias, q_start, q_count, kv_start, kv_count)
    steps = tl.where(places.even == EVEN, steps, 0)
    added = _by_distance(bias, head, places, start, start + ahead, M, N, False)
    sums = tl.zeros((M, N), tl.float32)
    for first in tl.range(start, start + steps * M, M):
        at = first + ahead  # of keys; some of them may come before the first or after the last
        rows, columns = q_count - first, kv_count - at
        q_block = _load(_ahead(q_rows, q_strides, first), q_strides, rows, D, WIDTH, M, True)
        k_block = _load_between(_ahead(k_rows, k_strides, at), k_strides, -at, columns, D, WIDTH, N)
        scores = tl.dot(q_block, tl.trans(k_block), input_precision=PRECISION) * (scale * _LOG2_E)
        if EVEN:
            scores += added
        else:
            distances = _uneven(places, first, at, M, N, False)
            scores += _by_distance(bias, head, places, first, at, M, N, False)
        probs = tl.exp2(scores - _load_lse(lse_rows, first, rows, M)[:, None])
        dout_block = _load(_ahead(dout_rows, dout_strides, first), dout_strides, rows, D, WIDTH, M, True)
        v_block = _load_between(_ahead(v_rows, v_strides, at), v_strides, -at, columns, D, WIDTH, N)
        dprobs = tl.dot(dout_block, tl.trans(v_block), input_precision=PRECISION)
        dscores = probs * (dprobs - _load_row(delta_rows, first, rows, M)[:, None])
        seen = _visible(first, at, more, left, right, columns, M, N, LEFT, RIGHT) & (tl.arange(0, N)[None, :] >= -at)
        dscores = tl.where(seen & (tl.arange(0, M)[:, None] < rows), dscores, 0.0)
        if EVEN:
            sums += dscores
        else:
            _add_by_distance(bias, head, dscores, distances)
    if EVEN:
        between = tl.arange(0, N)[None, :] - tl.arange(0, M)[:, None]
        _add_by_distance(bias, head, sums, places.apart + ahead + between)


@triton.jit(do_not_specialize=["tokens"])
def delta_of(
    delta, out, dout, delta_strides, out_strides, dout_strides, tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Fills delta (B, H, S) with rowsum(out * dout) of M tokens of a head."""
    first, head, batch = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2)
    rows, row = tokens - first, tl.arange(0, M)
    out_block = _load(_token(out, out_strides, batch, head, first), out_strides, rows, D, WIDTH, M, True)
    dout_block = _load(_token(dout, dout_strides, batch, head, first), dout_strides, rows, D, WIDTH, M, True)
    result = tl.sum(out_block.to(tl.float32) * dout_block.to(tl.float32), 1)
    tl.store(_row(delta, delta_strides, batch, head, first) + row, result, mask=row < rows)


class Bias(NamedTuple):
    """A `CallBias` as the kernels take it; `()` where there is none.

    distances    (2 reach + 1,) int32: rows, from reach on alike
    biases       (H, R + 2 reach + 1) fp32, to base 2: the table, and behind it its rows of `distances`
    sums         (H, R) int64: what the gradient adds up, 1 / unit each
    unit         (H,) fp32
    others       None where all goes by distance
    """

    q_position: tl.tensor
    kv_position: tl.tensor
    distances: tl.tensor
    biases: tl.tensor
    rows: int
    reach: int
    q_group: tl.tensor = None
    q_base: tl.tensor = None
    kv_group: tl.tensor = None
    kv_segment: tl.tensor = None
    pairs: tl.tensor = None
    other: int = None
    sums: tl.tensor = None
    unit: tl.tensor = None


@triton.jit
def _scores(products, scale, CAP: tl.constexpr):
    """The scores, to base 2, of products of queries and keys."""
    return products * (scale * _LOG2_E) if CAP is None else _tanh(products * (scale / CAP)) * (CAP * _LOG2_E)


@triton.jit
def _slope(scores, CAP: tl.constexpr):
    """By how much capped scores, to base 2, rise where scores without a cap rise by 1."""
    tanh = scores * (1.0 / (CAP * _LOG2_E))
    return 1.0 - tanh * tanh


@triton.jit
def _tanh(x):
    """To some units in the last place: near 0 by its series, since 1 - 2 / (e^2x + 1) has lost its digits there."""
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(tl.abs(x) < 0.25, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * _LOG2_E)) + 1.0))


@triton.jit
def _block(blocks):
    """This program's block: its first token in its sequence, and on its own and the other side start and length."""
    at = blocks + tl.program_id(0) * 5
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@triton.jit
def _edges(
    first, count, more, low, high, other_count,
    SIZE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ALL_MASKED: tl.constexpr,
):  # fmt: skip
    """Where, on the other side, the three parts of what tokens first .. first + count - 1 see begin, and the end.

    Token i sees j iff i + more - low <= j <= i + more + high, each where LOW and HIGH. Parts consist of whole blocks of
    SIZE, the last one's end aside; if ALL_MASKED, the last one has all.
    """
    begin, whole, end, stop = 0, 0, other_count // SIZE * SIZE, other_count
    if LOW:
        begin = tl.maximum(first + more - low, 0) // SIZE * SIZE
        whole = tl.cdiv(tl.maximum(first + count - 1 + more - low, 0), SIZE) * SIZE
    if HIGH:
        end = tl.minimum(end, tl.maximum(first + more + high + 1, 0) // SIZE * SIZE)
        stop = tl.minimum(stop, first + count + more + high)
    # Where no block is visible whole, the first part ends where the last one begins.
    whole = tl.minimum(whole, tl.cdiv(tl.maximum(stop, 0), SIZE) * SIZE)
    middle = tl.maximum(whole, end)
    if ALL_MASKED:
        whole = begin
        middle = begin
    return begin, whole, middle, stop


@triton.jit
def _visible(
    first, at, more, low, high, others, OWN: tl.constexpr, OTHER: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """(OWN, OTHER): whether tokens first .. see the other side's at .. of which there are `others`."""
    other = tl.arange(0, OTHER)[None, :]
    ahead = other - tl.arange(0, OWN)[:, None] + (at - first - more)
    result = tl.broadcast_to(other < others, (OWN, OTHER))
    if LOW:
        result &= ahead >= -low
    if HIGH:
        result &= ahead <= high
    return result


@triton.jit
def _seeing(first, more, left, right, kv_count, M: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """(M,): whether tokens first .. see any key."""
    middle = first + more + tl.arange(0, M)
    lowest = tl.zeros((M,), tl.int32)
    highest = lowest + kv_count - 1
    if LEFT:
        lowest = tl.maximum(lowest, middle - left)
    if RIGHT:
        highest = tl.minimum(highest, middle + right)
    return lowest <= highest


@triton.jit
def _token(x, strides, batch, head, token):
    """Where a token of x (B, S, H, D) is."""
    return x + _wide(batch) * strides[0] + _wide(token) * strides[1] + _wide(head) * strides[2]


@triton.jit
def _row(x, strides, batch, head, token):
    """Where a token's number in x (B, H, S) is, of strides `of_one_kind`; these lie side by side."""
    return x + _wide(batch) * (strides[0] // 16) + _wide(head) * (strides[1] // 16) + token


@triton.jit
def _wide(number):
    """Of 64 bits; in the interpreter, the counters of loops are Python's."""
    return tl.full((), number, tl.int64)


@triton.jit
def _ahead(at, strides, tokens):
    return at + _wide(tokens) * strides[1]


@triton.jit
def _load(at, strides, count, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr):
    """(SIZE, WIDTH): the tokens from `at` on, with zeros where D ends and, if CUT, after `count` of them."""
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    places = at + token * strides[1] + column
    if CUT and D < WIDTH:
        result = tl.load(places, mask=(token < count) & (column < D), other=0.0)
    elif CUT:
        result = tl.load(places, mask=token < count, other=0.0)
    elif D < WIDTH:
        result = tl.load(places, mask=column < D, other=0.0)
    else:
        result = tl.load(places)
    return result


@triton.jit
def _load_between(at, strides, begin, end, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """(SIZE, WIDTH): the tokens from `at` on, with zeros before those from `begin` to `end`, after them and after D."""
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    there = (token >= begin) & (token < end)
    return tl.load(at + token * strides[1] + column, mask=there & (column < D), other=0.0)


@triton.jit
def _store(at, strides, x, count, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Stores the first `count` tokens of x (SIZE, WIDTH)."""
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    tl.store(at + token * strides[1] + column, x.to(at.dtype.element_ty), mask=(token < count) & (column < D))


@triton.jit
def _load_row(at, first, count, SIZE: tl.constexpr):
    """(SIZE,): numbers of tokens first .. in (B, H, S), 0 after `count` of them."""
    token = tl.arange(0, SIZE)
    return tl.load(at + first + token, mask=token < count, other=0.0)


@triton.jit
def _load_lse(at, first, count, SIZE: tl.constexpr):
    """(SIZE,): lse to base 2, and inf where there is no token or it sees nothing, so that probabilities are 0."""
    token = tl.arange(0, SIZE)
    lse = tl.load(at + first + token, mask=token < count, other=_INFINITY)
    return tl.where(lse == -_INFINITY, _INFINITY, lse * _LOG2_E)


class Distances(NamedTuple):
    """The positions of a sequence's queries and keys.

    q_position, kv_position  where those of its first tokens are
    apart                    of its first key from its first query
    even                     whether neighbours are one apart on both sides
    """

    q_position: tl.tensor
    q_count: tl.tensor
    kv_position: tl.tensor
    kv_count: tl.tensor
    apart: tl.tensor
    even: tl.tensor


@triton.jit
def _distances(bias, q_start, q_count, kv_start, kv_count):
    """Positions rise in a sequence: they are even if the last one is."""
    queries, keys = bias.q_position + q_start, bias.kv_position + kv_start
    query, key = tl.load(queries, mask=q_count > 0, other=0), tl.load(keys, mask=kv_count > 0, other=0)
    last_query = tl.load(queries + q_count - 1, mask=q_count > 0, other=0)
    last_key = tl.load(keys + kv_count - 1, mask=kv_count > 0, other=0)
    even = (last_query - query == q_count - 1) & (last_key - key == kv_count - 1)
    return Distances(queries, q_count, keys, kv_count, key - query, even)


@triton.jit
def _positions(positions, first, count, SIZE: tl.constexpr):
    """(SIZE,): those of tokens first .. of a sequence of `count`, and 0."""
    token = first + tl.arange(0, SIZE)
    return tl.load(positions + token, mask=(token >= 0) & (token < count), other=0)


@triton.jit
def _spread(queries, keys, TRANSPOSED: tl.constexpr):
    """Numbers of queries and of keys as a column and a row, or the other way round."""
    return tl.expand_dims(queries, 0 if TRANSPOSED else 1), tl.expand_dims(keys, 1 if TRANSPOSED else 0)


@triton.jit
def _by_distance(bias, head, places, first, at, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(M, N), or (N, M) if TRANSPOSED: what is added to the scores of queries first .. and keys at .., to base 2."""
    # Places in the table are made positive before the pointer is added: to add less than 0 went wrong (Triton 3.6).
    biases, middle = bias.biases + head * (bias.rows + 2 * bias.reach + 1), bias.rows + bias.reach
    if places.even:
        # A block that is beyond reach may as well be nearer, as long as all of it is beyond that.
        distance = tl.minimum(tl.maximum(places.apart + at - first, M - bias.reach), bias.reach - N)
        query, key = _spread(tl.arange(0, M), tl.arange(0, N), TRANSPOSED)
        result = tl.load(biases + (middle + distance + key - query))
    else:
        distances = _uneven(places, first, at, M, N, TRANSPOSED)
        result = tl.load(biases + (middle + _clamp(distances, bias.reach)))
    return result


@triton.jit
def _uneven(places, first, at, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    """(M, N), or (N, M) if TRANSPOSED: distances, whatever the positions."""
    queries = _positions(places.q_position, first, places.q_count, M)
    keys = _positions(places.kv_position, at, places.kv_count, N)
    query, key = _spread(queries, keys, TRANSPOSED)
    return key - query


class Fields(NamedTuple):
    """What a bias says of the tokens first .. first + count - 1 of one side, SIZE of them or fewer.

    groups, segments, positions  (SIZE,); segments are bases on the queries' side
    group, segment               of the first token
    alike                        whether all tokens have these
    """

    groups: tl.tensor
    segments: tl.tensor
    positions: tl.tensor
    group: tl.tensor
    segment: tl.tensor
    alike: tl.tensor
    first: tl.tensor
    count: tl.tensor


@triton.jit
def _fields(groups, segments, positions, first, count, SIZE: tl.constexpr):
    token = tl.arange(0, SIZE)
    group, segment = tl.load(groups + first), tl.load(segments + first)
    all_groups = tl.load(groups + first + token, mask=token < count, other=group)
    all_segments = tl.load(segments + first + token, mask=token < count, other=segment)
    all_positions = tl.load(positions + first + token, mask=token < count, other=0)
    differ = tl.max(((all_groups != group) | (all_segments != segment)).to(tl.int32), 0)
    return Fields(all_groups, all_segments, all_positions, group, segment, differ == 0, first, count)


@triton.jit
def _q_fields(bias, first, count, M: tl.constexpr):
    return _fields(bias.q_group, bias.q_base, bias.q_position, first, count, M)


@triton.jit
def _kv_fields(bias, first, count, N: tl.constexpr):
    return _fields(bias.kv_group, bias.kv_segment, bias.kv_position, first, count, N)


@triton.jit
def _bias(bias, head, queries, keys, TRANSPOSED: tl.constexpr):
    """(M, N), or (N, M) if TRANSPOSED: what is added to the scores, to base 2."""
    biases = bias.biases + head * (bias.rows + 2 * bias.reach + 1)
    q_positions, kv_positions = _spread(queries.positions, keys.positions, TRANSPOSED)
    near = bias.rows + bias.reach + _clamp(kv_positions - q_positions, bias.reach)
    if queries.alike & keys.alike:
        row = tl.load(bias.pairs + queries.segment + keys.segment, mask=queries.group == keys.group, other=bias.other)
        result = tl.load(biases + tl.where(row < 0, near, row))
    else:
        rows = _pair_rows(bias, queries, keys, TRANSPOSED)
        result = tl.load(biases + tl.where(rows < 0, near, rows))
    return result


@triton.jit
def _pair_rows(bias, queries, keys, TRANSPOSED: tl.constexpr):
    """The rows of the table, negative where they go by distance."""
    q_groups, kv_groups = _spread(queries.groups, keys.groups, TRANSPOSED)
    bases, segments = _spread(queries.segments, keys.segments, TRANSPOSED)
    return tl.load(bias.pairs + (bases + segments), mask=q_groups == kv_groups, other=bias.other)


@triton.jit
def _clamp(distance, reach):
    return tl.minimum(tl.maximum(distance, -reach), reach)


@triton.jit
def _add_by_distance(bias, head, dscores, distances):
    """Adds dscores (M, N) to the sums of their rows, as integers: their sum is the same in any order."""
    sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
    rows = tl.load(bias.distances + (bias.reach + _clamp(distances, bias.reach)))
    first, last = tl.min(tl.min(rows, 1), 0), tl.max(tl.max(rows, 1), 0)
    if last - first < _FEW_ROWS:
        for row in tl.range(first, last + 1):
            total = tl.sum(tl.sum(tl.where(rows == row, dscores, 0.0), 1), 0)
            tl.atomic_add(sums + row, _whole(total, unit), mask=total != 0.0, sem="relaxed")
    else:
        tl.atomic_add(sums + rows, _whole(dscores, unit), mask=dscores != 0.0, sem="relaxed")


@triton.jit
def _add_near(bias, head, dscores, queries, keys, M: tl.constexpr):
    """Adds those of dscores (M, N) that go by distance, where keys are of one segment; the sums of the others (M,)."""
    rows = _rows_with(bias, queries, keys.group, keys.segment, queries.groups == keys.group)
    near = _there(queries, M) & (rows < 0)
    if tl.max(near.to(tl.int32), 0) > 0:
        distances = keys.positions[None, :] - queries.positions[:, None]
        _add_by_distance(bias, head, tl.where(near[:, None], dscores, 0.0), distances)
    return tl.sum(tl.where(near[:, None], 0.0, dscores), 1)


@triton.jit
def _add_waiting(bias, head, waiting, queries, group, segment, M: tl.constexpr):
    """Adds what queries have with keys of one segment (M,) to the sums of their rows."""
    some = _there(queries, M) & (waiting != 0.0)
    rows = _rows_with(bias, queries, group, segment, some & (queries.groups == group))
    unit = tl.load(bias.unit + head)
    tl.atomic_add(bias.sums + head * bias.rows + rows, _whole(waiting, unit), mask=some, sem="relaxed")


@triton.jit
def _there(fields, SIZE: tl.constexpr):
    """(SIZE,): which of a block's tokens there are. Beside keys of inf, gradients of the others' scores are NaN."""
    return tl.arange(0, SIZE) < fields.count


@triton.jit
def _rows_with(bias, queries, group, segment, same):
    """The rows (M,) of queries with keys of a segment, that of other groups' where they are not of the same."""
    return tl.load(bias.pairs + (queries.segments + segment), mask=same, other=bias.other)


@triton.jit
def _add_to_table(bias, head, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """Adds dscores (M, N) to the sums of their rows where these go by segments."""
    rows = _pair_rows(bias, queries, keys, False)
    near = tl.where(_there(queries, M)[:, None] & (rows < 0), dscores, 0.0)
    if tl.max(tl.max((near != 0.0).to(tl.int32), 1), 0) > 0:
        _add_by_distance(bias, head, near, keys.positions[None, :] - queries.positions[:, None])
    if tl.max(tl.max(rows, 1), 0) >= 0:
        sums, unit = bias.sums + head * bias.rows, tl.load(bias.unit + head)
        _add_by_runs(sums, unit, bias, tl.where(rows < 0, 0.0, dscores), queries, keys, M, N)


@triton.jit
def _add_by_runs(sums, unit, bias, dscores, queries, keys, M: tl.constexpr, N: tl.constexpr):
    """What does not go by distance, with zeros elsewhere. Queries of one run have the same row with a key: they are
    summed before they are added.
    """
    token = tl.arange(0, M)
    start = 0
    while start < queries.count:
        group = tl.load(bias.q_group + queries.first + start)
        base = tl.load(bias.q_base + queries.first + start)
        others = (token >= start) & ((queries.groups != group) | (queries.segments != base))
        stop = tl.min(tl.where(others, token, queries.count), 0)
        total = tl.sum(tl.where(((token >= start) & (token < stop))[:, None], dscores, 0.0), 0)
        row = tl.load(bias.pairs + (base + keys.segments), mask=keys.groups == group, other=bias.other)
        tl.atomic_add(sums + row, _whole(total, unit), mask=row >= 0, sem="relaxed")
        start = stop


@triton.jit
def _whole(x, unit):
    """The nearest number of units."""
    return tl.floor(x * unit + 0.5).to(tl.int64)
