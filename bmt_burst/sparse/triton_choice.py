"""Triton kernels of the choice of blocks. `choice.py` specifies it.

normalizers  A program has some queries of one head. It sums over all kernels 2 that they see.
scores       A program has some queries, and some blocks of a kv head. It sums over the query heads,
             one after the other, for the first kernel 1 of each block, then for the second one, ...
take         A program has the scores of one query. It lists the chosen blocks.

Scores are kept for some queries at a time. A kernel that overlaps two blocks is scored once: the
second block's copy of its score lies in an own tensor, because another program may score that
block.

A choice does not depend on the other queries of a program. All products have one shape, and sums
have one order. Launch shapes may change it, so they do not depend on a call's tokens.

Compressed keys are fp32. A product with 16-bit queries takes them as the sum of two 16-bit numbers,
which have 16 digits for bf16 and 22 for fp16. (The released code rounds them to one.)

Letters: T queries, H query heads, G kv heads, D head size, n kernels of a document. GROUP query
heads share a kv head. WIDTH is the power of two that D is padded to. A program has M queries and N
kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compressed import CompressedKeys
from .config import InfLLMV2
from .triton_far import address_rows, load_rows, make_dense, precision, wide

_LOG2_E = tl.constexpr(1.4426950408889634)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_NUMBERS = ["queries", "kernels", "blocks"]
_ROWS = ["places"]
_BYTES = 1 << 28  # of scores that are kept at a time
_TAKEN = 1024  # blocks that a program looks at together


class LaunchShape(NamedTuple):
    """The queries and kernels of a program, its warps, and pipeline stages."""

    M: int
    N: int
    warps: int
    stages: int


# Not measured.
_HALF = {"normalizers": LaunchShape(128, 64, 8, 2), "scores": LaunchShape(64, 64, 4, 2)}
_SINGLE = {"normalizers": LaunchShape(64, 32, 4, 1), "scores": LaunchShape(64, 32, 4, 1)}
_INTERPRETED = {"normalizers": LaunchShape(16, 16, 4, 1), "scores": LaunchShape(16, 16, 4, 1)}


def choose_by_score(
    q: Tensor, places: Tensor, keys: CompressedKeys, sparse: InfLLMV2, scale: float
) -> Tensor:
    """Return the chosen blocks of some queries of a document: (T, G, most_blocks) int32, rising,
    -1 at the end where there are fewer.

    q       (T, H, D) fp16, bf16 or fp32
    places  (T,) int64, rising: the places of the queries in the document. The host reads some.
    """
    groups, most = keys.scored.shape[1], sparse.most_blocks
    chosen = torch.empty(len(q), groups, most, dtype=torch.int32, device=q.device)
    if not len(q):
        return chosen
    halves = CompressedKeys(*(_split(x, q.dtype) for x in keys))
    # Kernels that exist bound the blocks: behind the last one is less than a kernel and a stride.
    blocks = (len(keys.scored) + 2) * sparse.kernel_stride // sparse.block_size + 1
    step = max(_BYTES // (8 * groups * blocks) // 128, 1) * 128
    ends = [min(start + step, len(q)) for start in range(0, len(q), step)]
    lasts = places[torch.tensor(ends, device=places.device) - 1].tolist()
    places = places.to(q.device)
    for end, last in zip(ends, lasts, strict=True):
        piece = slice((end - 1) // step * step, end)
        scores = score_blocks(q[piece], places[piece], halves, last, sparse, scale)
        taken = take_largest(scores.flatten(0, 1), most)
        chosen[piece] = taken.view(groups, -1, most).transpose(0, 1)
    return chosen


def score_blocks(
    q: Tensor, places: Tensor, keys: CompressedKeys, last: int, sparse: InfLLMV2, scale: float
) -> Tensor:
    """Return A of queries (T, H, D) and blocks up to that of place `last`: (G, T, blocks) fp32.

    It is -inf for blocks that begin after the query, and inf for those that are always chosen.

    keys  the compressed keys as `_split` returns them
    """
    q = make_dense(q)
    groups, blocks = keys.scored.shape[2], last // sparse.block_size + 1
    common = {
        "GROUP": q.shape[1] // groups,
        "D": q.shape[-1],
        "WIDTH": max(triton.next_power_of_2(q.shape[-1]), 16),
        "STRIDE": sparse.kernel_stride,
        "PARTS": len(keys.scored),
        "PRECISION": precision(q),
        "enable_fp_fusion": True,
    }
    normalizers = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
    shape = _shape("normalizers", q)
    _fill_normalizers[triton.cdiv(len(q), shape.M), q.shape[1]](
        q,
        keys.normalizing,
        normalizers,
        places,
        q.stride(),
        keys.normalizing.stride(),
        len(q),
        keys.normalizing.shape[1],
        scale,
        **common,
        **_options(shape),
    )
    scores = torch.empty(groups, len(q), blocks, dtype=torch.float32, device=q.device)
    # of the kernel that overlaps a block and the one before
    before = torch.empty(groups, len(q), blocks + 1, dtype=torch.float32, device=q.device)
    before[..., 0] = -torch.inf
    shape = _shape("scores", q)
    _fill_scores[triton.cdiv(len(q), shape.M), triton.cdiv(blocks, shape.N), groups](
        q,
        keys.scored,
        normalizers,
        scores,
        before,
        places,
        q.stride(),
        keys.scored.stride(),
        len(q),
        keys.scored.shape[1],
        blocks,
        scale,
        BLOCK=sparse.block_size,
        INIT=sparse.init_blocks,
        WINDOW=sparse.window_blocks,
        **common,
        **_options(shape),
    )
    return torch.maximum(scores, before[..., :-1], out=scores)


def take_largest(scores: Tensor, most: int) -> Tensor:
    """Return the `most` blocks with the largest scores (T, blocks), the lower of equal ones.

    They are int32 in rising order. A score of -inf is never taken. Missing blocks are -1.
    """
    blocks = scores.shape[1]
    values = scores.topk(min(most, blocks), sorted=False).values
    least = values.amin(1)
    rooms = (values == least.unsqueeze(1)).sum(1, dtype=torch.int32)
    taken = torch.full((len(scores), most), -1, dtype=torch.int32, device=scores.device)
    size = min(triton.next_power_of_2(blocks), _TAKEN)
    _take[(len(scores),)](scores, least, rooms, taken, blocks, MOST=most, N=size)
    return taken


def _split(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return compressed keys (n, G, D) as a sum of numbers of a dtype: (1 or 2, n, G, D)."""
    if dtype == torch.float32:
        return keys.unsqueeze(0)
    high = keys.to(dtype)
    return torch.stack([high, (keys - high).to(dtype)])


def _shape(name: str, q: Tensor) -> LaunchShape:
    if not q.is_cuda:
        return _INTERPRETED[name]
    return (_SINGLE if q.dtype == torch.float32 else _HALF)[name]


def _options(shape: LaunchShape) -> dict[str, Any]:
    return {"M": shape.M, "N": shape.N, "num_warps": shape.warps, "num_stages": shape.stages}


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _fill_normalizers(
    q, keys, normalizers, places, q_strides, key_strides, queries, kernels, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Fill the normalizers (H, T) L, to base 2, of some queries and one head."""
    head = tl.program_id(1)
    token, place = _queries_of(places, queries, M)
    q_block = load_rows(address_rows(q, q_strides, token, head), token < queries, D, WIDTH)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -_INFINITY, tl.float32)
    seen = (tl.max(place, 0) + 1 - 4 * STRIDE) // (4 * STRIDE)
    for at in tl.range(0, tl.minimum(seen, kernels), N):
        kernel = at + tl.arange(0, N)
        high, low = _load_keys(keys, key_strides, kernel, head // GROUP, kernels, D, WIDTH, PARTS)
        scores = _score(q_block, high, low, scale, PARTS, PRECISION)
        hidden = _hidden(kernel, 4 * STRIDE, 8 * STRIDE, place)
        scores = tl.where(hidden, -_INFINITY, scores)
        now = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(now == -_INFINITY, 0.0, now)
        weights = weights * tl.exp2(largest - shift) + tl.sum(tl.exp2(scores - shift[:, None]), 1)
        largest = now
    result = tl.where(weights == 0.0, 0.0, largest + tl.log2(weights))
    tl.store(normalizers + wide(head) * queries + token, result, mask=token < queries)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ROWS)
def _fill_scores(
    q, keys, normalizers, scores, before, places, q_strides, key_strides,
    queries, kernels, blocks, scale,
    BLOCK: tl.constexpr, INIT: tl.constexpr, WINDOW: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Fill scores (G, T, blocks) of some queries and blocks, by the kernels that begin in a block.

    Also fill before (G, T, blocks + 1): the score of a block's last kernel, at the next block.
    """
    first, group = tl.program_id(1) * N, tl.program_id(2)
    token, place = _queries_of(places, queries, M)
    block, own = first + tl.arange(0, N), place // BLOCK
    EACH: tl.constexpr = BLOCK // STRIDE
    largest = tl.full((M, N), -1.0, tl.float32)
    sums = tl.full((M, N), -1.0, tl.float32)
    for nth in tl.range(0, tl.where(first <= tl.max(own, 0), EACH, 0)):
        kernel = block * EACH + nth
        high, low = _load_keys(keys, key_strides, kernel, group, kernels, D, WIDTH, PARTS)
        sums = tl.zeros((M, N), tl.float32)
        for head in tl.range(group * GROUP, group * GROUP + GROUP):
            rows = address_rows(q, q_strides, token, head)
            q_block = load_rows(rows, token < queries, D, WIDTH)
            normalizer = tl.load(
                normalizers + wide(head) * queries + token, mask=token < queries, other=0.0
            )
            terms = _score(q_block, high, low, scale, PARTS, PRECISION)
            sums += tl.exp2(terms - normalizer[:, None])
        hidden = _hidden(kernel, STRIDE, 2 * STRIDE, place)
        sums = tl.where(hidden | (sums != sums), -1.0, tl.minimum(sums, _LARGEST))
        largest = tl.maximum(largest, sums)

    always = (block < INIT)[None, :] | (block[None, :] >= own[:, None] - WINDOW)
    largest = tl.where(always, _INFINITY, largest)
    largest = tl.where(block[None, :] > own[:, None], -_INFINITY, largest)
    sums = tl.where(block[None, :] + 1 > own[:, None], -_INFINITY, sums)
    mask = (token < queries)[:, None] & (block < blocks)[None, :]
    row = wide(group) * queries + token[:, None]
    tl.store(scores + row * blocks + block[None, :], largest, mask=mask)
    tl.store(before + row * (blocks + 1) + block[None, :] + 1, sums, mask=mask)


@triton.jit(do_not_specialize=_NUMBERS)
def _take(scores, least, rooms, taken, blocks, MOST: tl.constexpr, N: tl.constexpr):
    """List the blocks of one row of scores that are above `least`, and the first `room` equal
    ones.
    """
    row = tl.program_id(0)
    bound, room = tl.load(least + row), tl.load(rooms + row)
    count, equals = 0, 0
    for at in tl.range(0, blocks, N):
        block = at + tl.arange(0, N)
        score = tl.load(scores + wide(row) * blocks + block, mask=block < blocks, other=-_INFINITY)
        equal = (score == bound).to(tl.int32)
        fits = equals + tl.cumsum(equal, 0) <= room
        wanted = (score > -_INFINITY) & ((score > bound) | ((equal != 0) & fits))
        ones = wanted.to(tl.int32)
        place = count + tl.cumsum(ones, 0) - 1
        tl.store(taken + wide(row) * MOST + place, block, mask=wanted)
        count += tl.sum(ones, 0)
        equals += tl.sum(equal, 0)


@triton.jit
def _queries_of(places, queries, M: tl.constexpr):
    """Return the program's queries and their places in the document, -1 behind the last query."""
    token = tl.program_id(0) * M + tl.arange(0, M)
    return token, tl.load(places + token, mask=token < queries, other=-1).to(tl.int32)


@triton.jit
def _hidden(kernel, stride, size, place):
    """Return the pairs (M, N) of queries and kernels that end after them.

    Kernels after the last one of the document are among them.
    """
    end = kernel * stride + size
    return end[None, :] > place[:, None] + 1


@triton.jit
def _load_keys(
    keys, strides, kernel, group, kernels, D: tl.constexpr, WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Load both parts of compressed keys (PARTS, n, G, D): (N, WIDTH) each."""
    rows = keys + kernel.to(tl.int64) * strides[1] + group * strides[2]
    high = load_rows(rows, kernel < kernels, D, WIDTH)
    low = high
    if PARTS == 2:
        low = load_rows(rows + wide(strides[0]), kernel < kernels, D, WIDTH)
    return high, low


@triton.jit
def _score(q_block, high, low, scale, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the scores (M, N), to base 2."""
    if PARTS == 2:
        scores = tl.dot(q_block, tl.trans(low))
        scores = tl.dot(q_block, tl.trans(high), scores)
    else:
        scores = tl.dot(q_block, tl.trans(high), input_precision=PRECISION)
    return scores * (scale * _LOG2_E)
