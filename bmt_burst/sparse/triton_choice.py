"""Triton kernels of the choice of blocks. `choice.py` specifies it.

normalize  A program has a tile: some neighbouring queries of a document, with the query heads of
           one kv head. It sums over the kernels 2 that they see.
scores     A program has a tile and a span of blocks. It loops over their kernels 1, and sums over
           heads.
take       A program has the scores of one query, or of a span of them. It finds the least score
           that is chosen by bisection over the bits of a number, and lists the blocks. Another one
           takes from what the spans of a query listed.

Scores are kept for some tiles of all documents at a time. Of long documents these are few: spans of
blocks make enough programs for a GPU. A kernel that overlaps two blocks is scored once: `scores`
has the largest score of the kernels that begin in a block, `of_last` that of the last of these.

A choice does not depend on the other queries of a program. All products have one shape, and sums
have one order. Launch shapes may change it, so they do not depend on a call's tokens.

Compressed keys are fp32. A product with 16-bit queries takes them as the sum of two 16-bit numbers
(`split`), which have 16 digits for bf16 and 22 for fp16. The released code rounds them to one.

Letters: T tokens, F queries that choose, H query heads, G kv heads, D head size, n kernels of all
documents. GROUP query heads share a kv head, and HEADS is the power of two that they are padded to.
WIDTH is that of D, and EACH that of the kernels that begin in a block. A program has M = TOKENS *
HEADS rows. A step has N kernels.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..base.streams import send_to_device
from ..blocks.triton_far import count_tokens, tile_rows
from ..kernels.packed import prepare_once
from ..kernels.triton import LaunchShape, make_dense, padded_width, precision
from ..kernels.triton_memory import INFINITY, LOG2_E, address_rows, load_rows, wide
from ..sequence.span import length
from .compressed import CompressedKeys
from .config import Constants
from .queries import Choosers

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_ALWAYS = tl.constexpr(torch.iinfo(torch.int32).max)

_NUMBERS = ["first", "queries", "blocks"]
_ROWS = ["tokens", "places"]
_BYTES = 1 << 29  # of scores that are kept at a time
_SPAN = 1024  # blocks that a program scores
_LN_2 = math.log(2.0)
# Kernels 2 and blocks of a program where few queries choose: those of 1M tokens have 64 and 128
# programs. They are whole numbers of steps.
_NORMALIZED, _SCORED = 256, 128
# The most blocks of a program that takes, a power of two, and those of a warp
_TAKEN, _OF_WARP = 2048, 512
# M rows and N kernels of a step
_HALF = LaunchShape(128, 64, 4, 2)  # on one H200, with head size 128
_SINGLE = LaunchShape(64, 32, 4, 1)  # not measured
_INTERPRETED = LaunchShape(16, 16, 4, 1)


class ChoicePiece(NamedTuple):
    """Tiles and their queries, whose scores are kept at a time, and the blocks that these see."""

    tiles: slice
    queries: slice
    blocks: int


class Tiles(NamedTuple):
    """The tiles of all queries that choose.

    table   (tiles, 4) int32: the first query of a tile, the one after its last query, and the first
            stride and the number of strides of its document's keys
    tokens  (F,) int64: which tokens the queries are
    places  (F,) int64: the places of the queries in their documents
    pieces  all tiles
    """

    table: Tensor
    tokens: Tensor
    places: Tensor
    pieces: tuple[ChoicePiece, ...]

    @staticmethod
    def of(
        choosers: Choosers, tokens: int, block_size: int, groups: int, device: torch.device
    ) -> Tiles:
        """Cut the queries into tiles of up to `tokens` queries, each of one document."""
        rows = [
            (first, min(first + tokens, stop), strides[0], length(strides))
            for _, (start, stop), strides in choosers.documents
            for first in range(start, stop, tokens)
        ]
        blocks = int(choosers.places.max()) // block_size + 1
        step, pieces = max(_BYTES // (8 * groups * blocks * tokens), 1), list[ChoicePiece]()
        for first in range(0, len(rows), step):
            tiles = slice(first, min(first + step, len(rows)))
            queries = slice(rows[first][0], rows[tiles.stop - 1][1])
            seen = int(choosers.places[queries].max()) // block_size + 1
            pieces.append(ChoicePiece(tiles, queries, seen))
        numbers = torch.tensor(rows, dtype=torch.int32), choosers.tokens, choosers.places
        table, every, places = (send_to_device(x, device) for x in numbers)
        return Tiles(table, every, places, tuple(pieces))


def choose_by_score(
    q: Tensor, choosers: Choosers, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Do what `choice.choose_by_score` does, for fp16, bf16 or fp32 queries."""
    shape = len(choosers.places), keys.scored.shape[1], sparse.most_blocks
    chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    if not choosers.documents:
        return chosen
    halves = CompressedKeys(*(split(x, q.dtype) for x in keys))
    tiles = find_tiles(q, choosers, sparse, shape[1])
    scorer = Scorer(make_dense(q), tiles, halves, sparse, scale)
    normalizers = scorer.normalize()
    for piece in tiles.pieces:
        scores = scorer.score_blocks(piece, normalizers, _SPAN)
        take_largest(*scores, tiles.places[piece.queries], chosen[piece.queries], sparse)
    return chosen


def find_tiles(q: Tensor, choosers: Choosers, sparse: Constants, groups: int) -> Tiles:
    """Return the tiles of some queries, on the device of q (T, H, D)."""
    tokens = count_queries(q, groups)

    make = functools.partial(Tiles.of, choosers, tokens, sparse.block_size, groups, q.device)
    return prepare_once(choosers, ("tiles", tokens, groups), q.device, make)


def choose_in_spans(
    q: Tensor, tiles: Tiles, keys: CompressedKeys, sparse: Constants, scale: float
) -> Tensor:
    """Return the blocks that queries choose: (F, G, most_blocks) int32, rising, -1 at the end where
    there are fewer. Queries may see few blocks, and then choose all.

    More programs than in `choose_by_score` share the keys of a query, for few queries. So sums have
    another order. What is launched does not depend on numbers in the memory of the tiles.

    tiles  with one piece, which has all blocks that there is memory for
    """
    [piece], scorer = tiles.pieces, Scorer(make_dense(q), tiles, keys, sparse, scale)
    kernels = piece.blocks * sparse.block_size // (4 * sparse.kernel_stride)
    parts = scorer.normalize(max(triton.cdiv(kernels, _NORMALIZED), 1))
    total = (parts * _LN_2).logsumexp(0) / _LN_2
    normalizers = total.masked_fill(total == -torch.inf, 0.0)
    scores = scorer.score_blocks(piece, normalizers, _SCORED)
    shape = len(tiles.places), keys.scored.shape[2], sparse.most_blocks
    chosen = torch.full(shape, -1, dtype=torch.int32, device=q.device)
    take_largest(*scores, tiles.places, chosen, sparse)
    return chosen


class Scorer(NamedTuple):
    """Dense queries (T, H, D) and the keys that they score, as kernels take them."""

    q: Tensor
    tiles: Tiles
    keys: CompressedKeys
    sparse: Constants
    scale: float

    def normalize(self, spans: int | None = None) -> Tensor:
        """Return the logarithm to base 2 of the sum over kernels 2 that a query sees: (F, H) fp32,
        and 0 where it sees none. With `spans`, return those of each _NORMALIZED kernels: (spans, F,
        H), and -inf where it sees none.
        """
        q, tiles, keys, _, scale = self
        shape = spans or 1, len(tiles.places), q.shape[1]
        normalizers = q.new_empty(shape, dtype=torch.float32)
        tensors = q, keys.normalizing, tiles.table, tiles.tokens, tiles.places, normalizers
        strides, groups = (q.stride(), keys.normalizing.stride()), keys.scored.shape[2]
        constants = self._constants(spans and _NORMALIZED) | {"N": _find_shape(q).N}
        programs = len(tiles.table), groups, shape[0]
        _normalize[programs](*tensors, *strides, shape[1], scale, **constants)
        return normalizers if spans else normalizers[0]

    def score_blocks(
        self, piece: ChoicePiece, normalizers: Tensor, span: int
    ) -> tuple[Tensor, Tensor]:
        """Return the largest S of the kernels that begin in each block, and the S of the last of
        these kernels: (G, F, blocks) fp32 each, for the F queries of a piece. They are -1 where no
        kernel is visible, and undefined for blocks of a query's window and after it.

        normalizers  those of all queries, as `normalize` returns them
        span         the blocks of a program
        """
        q, tiles, keys, sparse, scale = self
        groups, first = keys.scored.shape[2], piece.queries.start
        shape = groups, piece.queries.stop - first, piece.blocks
        scores, of_last = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
        each = triton.next_power_of_2(sparse.block_size // sparse.kernel_stride)
        table = tiles.table[piece.tiles]
        tensors = q, keys.scored, table, tiles.tokens, tiles.places, normalizers, scores, of_last
        strides, sizes = (q.stride(), keys.scored.stride()), (first, shape[1], piece.blocks)
        constants = self._constants(span) | {"EACH": each, "N": max(_find_shape(q).N, each)}
        constants |= {"BLOCK": sparse.block_size, "WINDOW": sparse.window_blocks}
        programs = len(table), groups, triton.cdiv(piece.blocks, span)
        _fill_scores[programs](*tensors, *strides, *sizes, scale, **constants)
        return scores, of_last

    def _constants(self, span: int | None) -> dict[str, Any]:
        """Return the constants that both kernels have."""
        q, groups = self.q, self.keys.scored.shape[2]
        group = q.shape[1] // groups
        return {
            "TOKENS": count_queries(q, groups),
            "GROUP": group,
            "HEADS": triton.next_power_of_2(group),
            "D": q.shape[-1],
            "WIDTH": padded_width(q),
            "STRIDE": self.sparse.kernel_stride,
            "SPAN": span,
            "PARTS": len(self.keys.scored),
            "PRECISION": precision(q),
            **_find_shape(q).options,
        }


def take_largest(
    scores: Tensor, of_last: Tensor, places: Tensor, chosen: Tensor, sparse: Constants
) -> None:
    """Fill chosen (T, G, most_blocks), which are -1, with the blocks that each query takes."""
    (groups, queries, blocks), most = scores.shape, sparse.most_blocks
    constants = {"MOST": most, "BLOCK": sparse.block_size}
    constants |= {"INIT": sparse.init_blocks, "WINDOW": sparse.window_blocks}

    def take(listed: Tensor | None, into: Tensor, count: int, spans: int = 1) -> None:
        size = max(triton.next_power_of_2(count), 16)
        numbers, warps = (queries, blocks, count), min(max(size // _OF_WARP, 1), 32)
        _take[queries, groups, spans](
            scores, of_last, places, listed, into, *numbers, **constants, N=size, num_warps=warps
        )

    if blocks <= _TAKEN:
        take(None, chosen, blocks)
        return
    spans = triton.cdiv(blocks, _TAKEN)
    listed = chosen.new_full((queries, groups, spans * most), -1)
    take(None, listed, _TAKEN, spans)
    take(listed, chosen, spans * most)


def split(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return compressed keys (n, G, D) as a sum of numbers of a dtype: (1 or 2, n, G, D)."""
    if dtype == torch.float32:
        return keys.unsqueeze(0)
    high = keys.to(dtype)
    return torch.stack([high, (keys - high).to(dtype)])


def count_queries(q: Tensor, groups: int) -> int:
    """Return the queries of a tile of q (..., H, D)."""
    return count_tokens(_find_shape(q).M, triton.next_power_of_2(q.shape[-2] // groups))


def _find_shape(q: Tensor) -> LaunchShape:
    if not q.is_cuda:
        return _INTERPRETED
    return _SINGLE if q.dtype == torch.float32 else _HALF


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _normalize(
    q, normalizing, tiles, tokens, places, normalizers, q_strides, normalizing_strides, queries,
    scale,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Fill normalizers (spans, F, H) of a tile. Without SPAN there is one span, of all kernels."""
    group = tl.program_id(1)
    # the last queries of a document see most: they begin
    begin, end, first, strides = _load_tile(tiles + 4 * (tl.num_programs(0) - 1 - tl.program_id(0)))
    query, token, head, there = tile_rows(tokens, begin, end, TOKENS, GROUP, HEADS)
    place = tl.load(places + query, mask=query < end, other=-1).to(tl.int32)
    q_block = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)

    weights = tl.zeros((TOKENS * HEADS,), tl.float32)
    largest = tl.full((TOKENS * HEADS,), -INFINITY, tl.float32)
    seen = (tl.max(place, 0) + 1 - 4 * STRIDE) // (4 * STRIDE)
    kernels = tl.maximum(strides - 4, 0) // 4
    start, stop = 0, tl.minimum(seen, kernels)
    if SPAN is not None:
        start = tl.program_id(2) * SPAN
        stop = tl.minimum(stop, start + SPAN)
    for at in tl.range(start, stop, N):
        kernel = at + tl.arange(0, N)
        terms = _score(
            q_block, normalizing, normalizing_strides, first // 4 + kernel, kernel < kernels,
            group, scale, D, WIDTH, PARTS, PRECISION, False,
        )  # fmt: skip
        ends = kernel * (4 * STRIDE) + 8 * STRIDE
        terms = tl.where(ends[None, :] > place[:, None] + 1, -INFINITY, terms)
        now = tl.maximum(largest, tl.max(terms, 1))
        shift = tl.where(now == -INFINITY, 0.0, now)
        weights = weights * tl.exp2(largest - shift) + tl.sum(tl.exp2(terms - shift[:, None]), 1)
        largest = now
    normalizer = largest + tl.log2(weights)
    if SPAN is None:
        normalizer = tl.where(weights == 0.0, 0.0, normalizer)
    heads = tl.num_programs(1) * GROUP
    first_row = wide(tl.program_id(2)) * queries
    tl.store(normalizers + (first_row + query) * heads + head, normalizer, mask=there)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _fill_scores(
    q, scored, tiles, tokens, places, normalizers, scores, of_last, q_strides, scored_strides,
    first, queries, blocks, scale,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    EACH: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Fill scores and of_last (G, F, blocks) of a tile, for those blocks of a span that one of its
    queries sees. They begin with query `first`.
    """
    group = tl.program_id(1)
    begin, end, first_stride, strides = _load_tile(tiles + 4 * tl.program_id(0))
    query, token, head, there = tile_rows(tokens, begin, end, TOKENS, GROUP, HEADS)
    q_block = load_rows(address_rows(q, q_strides, token, head), there, D, WIDTH)
    at = query.to(tl.int64) * tl.num_programs(1) * GROUP + head
    normalizer = tl.load(normalizers + at, mask=there, other=INFINITY)  # of padding: adds nothing
    BEGIN: tl.constexpr = BLOCK // STRIDE  # kernels that begin in a block
    own = begin + tl.arange(0, TOKENS)
    own_place = tl.load(places + own, mask=own < end, other=-1).to(tl.int32)
    first_block = tl.program_id(2) * SPAN
    seen = tl.max(own_place, 0) // BLOCK - WINDOW  # later blocks are always chosen
    for at in tl.range(first_block, tl.minimum(seen, first_block + SPAN), N // EACH):
        nth = tl.arange(0, N)
        kernel = (at + nth // EACH) * BEGIN + nth % EACH
        is_one = (nth % EACH < BEGIN) & (kernel < strides - 1)
        terms = _score(  # heads are next to each other, so their sum needs few shuffles
            q_block, scored, scored_strides, first_stride + kernel, is_one, group, scale,
            D, WIDTH, PARTS, PRECISION, True,
        )  # fmt: skip
        terms = tl.exp2(terms - normalizer[None, :])
        sums = tl.sum(tl.reshape(terms, (N, TOKENS, HEADS)), 2)
        hidden = (kernel * STRIDE + 2 * STRIDE)[:, None] > own_place[None, :] + 1
        hidden = hidden | (nth % EACH >= BEGIN)[:, None] | (sums != sums)
        sums = tl.where(hidden, -1.0, tl.minimum(sums, _LARGEST))
        sums = tl.reshape(sums, (N // EACH, EACH, TOKENS))
        is_last = (tl.arange(0, EACH) == BEGIN - 1)[None, :, None]
        block = at + tl.arange(0, N // EACH)
        mask = (block < blocks)[:, None] & (own < end)[None, :]
        to = (wide(group) * queries + own[None, :] - first) * blocks + block[:, None]
        tl.store(scores + to, tl.max(sums, 1), mask=mask)
        tl.store(of_last + to, tl.max(tl.where(is_last, sums, -1.0), 1), mask=mask)


@triton.jit
def _load_tile(tile):
    """Load a row of a table of tiles."""
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit(
    do_not_specialize=[*_NUMBERS, "count"],
    do_not_specialize_on_alignment=[*_ROWS, "listed", "chosen"],
)
def _take(
    scores, of_last, places, listed, chosen, queries, blocks, count,
    MOST: tl.constexpr, BLOCK: tl.constexpr, INIT: tl.constexpr, WINDOW: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """List the blocks of a query that are always chosen or have the largest A, in rising order.

    A program of a span takes from N blocks. With `listed` (queries, G, count) it takes from these,
    which are rising, with -1 in between.
    """
    token, group, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = (tl.load(places + token) // BLOCK).to(tl.int32)
    to = wide(token) * tl.num_programs(1) + group
    block = span * N + tl.arange(0, N)
    if listed is not None:
        block = tl.load(listed + to * count + block, mask=block < count, other=-1)
    row = (wide(group) * queries + token) * blocks
    scored = (block >= 0) & (block < own - WINDOW)
    score = tl.load(scores + row + block, mask=scored, other=-1.0)
    before = tl.load(of_last + row + block - 1, mask=scored & (block > 0), other=-1.0)
    score = tl.maximum(score, before)
    # Numbers that are not negative have the order of their bits.
    rank = tl.where(score < 0.0, 0, score.to(tl.int32, bitcast=True) + 1)
    rank = tl.where((block < INIT) | (block >= own - WINDOW), _ALWAYS, rank)
    rank = tl.where((block >= 0) & (block <= own), rank, -1)
    # The largest number that at least MOST blocks reach, or one that MOST blocks reach.
    bound, reached, bit = 0, tl.sum((rank >= 0).to(tl.int32), 0), 1 << 30
    while (reached > MOST) & (bit > 0):
        higher = bound | bit
        above = tl.sum((rank >= higher).to(tl.int32), 0)
        reached = tl.where(above >= MOST, above, reached)
        bound = tl.where(above >= MOST, higher, bound)
        bit >>= 1
    room = MOST - tl.sum((rank > bound).to(tl.int32), 0)
    equal = rank == bound
    wanted = (rank > bound) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    at = (to * tl.num_programs(2) + span) * MOST + tl.cumsum(wanted.to(tl.int32), 0) - 1
    tl.store(chosen + at, block, mask=wanted)


@triton.jit
def _score(
    q_block, keys, strides, kernel, there, group, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute base-2 scores of keys (PARTS, n, G, D): (N, M) if KEYS_FIRST, else (M, N)."""
    rows = keys + kernel.to(tl.int64) * strides[1] + group * strides[2]
    high = load_rows(rows, there, D, WIDTH)
    if PARTS == 2:
        low = load_rows(rows + wide(strides[0]), there, D, WIDTH)
        if KEYS_FIRST:
            scores = tl.dot(high, tl.trans(q_block), tl.dot(low, tl.trans(q_block)))
        else:
            scores = tl.dot(q_block, tl.trans(high), tl.dot(q_block, tl.trans(low)))
    elif KEYS_FIRST:
        scores = tl.dot(high, tl.trans(q_block), input_precision=PRECISION)
    else:
        scores = tl.dot(q_block, tl.trans(high), input_precision=PRECISION)
    return scores * (scale * LOG2_E)
