"""Loads and stores of tokens in the Triton kernels. `triton_blocks.py` explains the letters."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def token_at(x, strides, batch, head, token):
    """Return the address of a token of x (B, S, H, D)."""
    return x + wide(batch) * strides[0] + wide(token) * strides[1] + wide(head) * strides[2]


@triton.jit
def row_at(x, strides, batch, head, token):
    """Return the address of a token in x (B, H, S).

    Strides were passed through `multiply_by_16`. Tokens are neighbours in memory.
    """
    return x + wide(batch) * (strides[0] // 16) + wide(head) * (strides[1] // 16) + token


@triton.jit
def wide(number):
    """Convert a number to 64 bits. In the interpreter loop counters are Python's integers."""
    return tl.full((), number, tl.int64)


@triton.jit
def read(
    at, strides, first, count,
    D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Load SIZE tokens, `first` tokens after the address `at`: (SIZE, WIDTH).

    Columns after D are 0. If CUT, tokens after `count` are 0, too.
    """
    token, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    places = at + wide(first) * strides[1] + token * strides[1] + column
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
def read_own(
    x, strides, batch, head, token, count, D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """Load the first `count` tokens from `token` on of x (B, S, H, D): (SIZE, WIDTH)."""
    return read(token_at(x, strides, batch, head, token), strides, 0, count, D, WIDTH, SIZE, True)


@triton.jit
def store(
    into, strides, batch, head, token, x, count,
    D: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the first `count` rows of x (SIZE, WIDTH) to the tokens from `token` on."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    places = token_at(into, strides, batch, head, token) + row * strides[1] + column
    tl.store(places, x.to(into.dtype.element_ty), mask=(row < count) & (column < D))


@triton.jit
def load_row(at, first, count, SIZE: tl.constexpr):
    """Load (SIZE,) numbers of tokens first .. of a (B, H, S) tensor, 0 after `count` of them."""
    token = tl.arange(0, SIZE)
    return tl.load(at + first + token, mask=token < count, other=0.0)


@triton.jit
def load_lse(at, first, count, SIZE: tl.constexpr):
    """Load (SIZE,) lse of tokens first .., to base 2.

    It is inf after `count` tokens and for tokens that see nothing. This makes probabilities 0.
    """
    token = tl.arange(0, SIZE)
    lse = tl.load(at + first + token, mask=token < count, other=INFINITY)
    return tl.where(lse == -INFINITY, INFINITY, lse * LOG2_E)


@triton.jit
def address_rows(x, strides, token, head):
    """Return the addresses of rows of x (S, H, D)."""
    return x + token.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_rows(places, there, D: tl.constexpr, WIDTH: tl.constexpr, left=0):
    """Load numbers left .. left + WIDTH - 1 of rows of D: (rows, WIDTH). Others are 0."""
    column = left + tl.arange(0, WIDTH)[None, :]
    mask = there[:, None]
    if D % WIDTH != 0:
        mask = mask & (column < D)
    return tl.load(places[:, None] + column, mask=mask, other=0.0)


@triton.jit
def store_rows(places, x, there, D: tl.constexpr, WIDTH: tl.constexpr, left=0):
    """Store x (rows, WIDTH) to what `load_rows` loads."""
    column = left + tl.arange(0, WIDTH)[None, :]
    mask = there[:, None]
    if D % WIDTH != 0:
        mask = mask & (column < D)
    tl.store(places[:, None] + column, x, mask=mask)
