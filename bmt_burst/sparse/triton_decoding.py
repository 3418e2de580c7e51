"""Sparse attention of new tokens on GPUs, with launches that do not depend on earlier tokens.

Kernels read the position of the new tokens from the GPU's memory, and there is memory for all
tokens up to a limit. So a CUDA graph of these functions serves all lengths.

Letters: B batch, S new tokens, T keys in memory, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.triton import padded_width, precision
from ..kernels.triton_blocks import add_product, scores_of, weigh
from ..kernels.triton_few_queries import choose_shape, count_programs, store_part
from ..kernels.triton_memory import INFINITY, LOG2_E, read, token_at, wide
from ..memories.protocol import select_rows
from ..merging.parts import Partials
from ..spec import Spec
from .compressed import CompressedKeys, KeySums
from .config import Constants
from .triton_choice import ChoicePiece, Tiles, choose_in_spans, count_queries, split

_RECENT = tl.constexpr(8)  # sums of strides that are kept: a kernel 2 has 8 of them
_MOST_TOKENS = 64  # whose scores of all blocks are kept at a time
_COLUMNS = 256  # of a program of `_add_keys`


class DecodingKeys:
    """The compressed keys of a layer, in memory for `limit` tokens. They are those of `KeySums`,
    bit for bit if a stride has 2^n tokens.

    sums   those of the tokens so far, or None if there are none
    k      (B, S, G, D), keys such as those that are added: fp16, bf16 or fp32
    limit  the most tokens
    """

    def __init__(self, sums: KeySums | None, k: Tensor, limit: int, sparse: Constants):
        self.sparse, self._blocks = sparse, -(-limit // sparse.block_size)
        # of a row of the batch: of whole blocks, and of whole kernels 2
        self._strides = -(-self._blocks * sparse.block_size // (4 * sparse.kernel_stride)) * 4
        rows, shape = len(k) * self._strides, k.shape[2:]
        parts = 1 if k.dtype == torch.float32 else 2  # see `split`
        self._keys = CompressedKeys(
            k.new_empty(parts, rows, *shape), k.new_empty(parts, rows // 4, *shape)
        )
        self._recent = k.new_zeros(len(k), _RECENT.value, *shape, dtype=torch.float32)
        if sums is None:
            return
        for row in range(len(k)):
            for x, kept, most in zip(sums.compress(row), self._keys, (1, 4), strict=True):
                first = row * self._strides // most
                kept[:, first : first + len(x)] = split(x, k.dtype)
        strides = sums.strides()
        for n in range(max(len(strides) - _RECENT.value, 0), len(strides)):
            self._recent[:, n % _RECENT.value] = strides[n]

    def select_rows(self, rows: Tensor) -> bool:
        """Keep these rows (N,) int64 of the batch. Return whether that is in place."""
        before, batch = self._recent, len(self._recent)
        self._recent = select_rows(before, rows)
        each = (select_rows(x.unflatten(1, (batch, -1)), rows, 1) for x in self._keys)
        self._keys = CompressedKeys(*(x.flatten(1, 2) for x in each))
        return self._recent is before

    def extend(self, keys: Tensor, first: Tensor) -> None:
        """Add the keys (B, S, G, D) of new tokens. The first has position `first`, (1,) int64."""
        batch, tokens, groups, head_size = keys.shape
        entries = groups * head_size
        _add_keys[batch, triton.cdiv(entries, _COLUMNS)](
            keys.contiguous(), first, self._recent, *self._keys, tokens, entries, self._strides,
            STRIDE=self.sparse.kernel_stride, PARTS=len(self._keys.scored), COLUMNS=_COLUMNS,
        )  # fmt: skip

    def attend(
        self,
        q: Tensor,
        by_q: Tensor,
        k: Tensor,
        v: Tensor,
        at_hand: KeysAtHand,
        first: Tensor,
        prepared: dict[Any, Any],
        spec: Spec,
    ) -> Partials:
        """Return the attention of new tokens, whose keys were added, to the keys at hand in the
        blocks that they choose.

        q, by_q   (B, S, H, D), the queries, and those to choose by
        first     (1,) int64, the position of the first one, on q's device
        prepared  what layers share that compute these tokens
        """
        (batch, tokens, heads, head_size), groups = q.shape, k.shape[2]
        parts = []
        for start in range(0, tokens, _MOST_TOKENS):
            by = by_q[:, start : start + _MOST_TOKENS].contiguous()
            size = count_queries(by, groups)
            key = start, size, self._strides, self.sparse
            if key not in prepared:
                prepared[key] = self._find_tiles(by, size, first + start, first + tokens)
            inputs = by.flatten(0, 1), prepared[key], self._keys, self.sparse, spec.scale
            parts.append(choose_in_spans(*inputs).unflatten(0, (batch, -1)))
        chosen, q = torch.cat(parts, 1), q.contiguous()
        share, most = heads // groups, self.sparse.most_blocks
        # programs that share the blocks of a query
        each = triton.cdiv(most, max(count_programs(q) // (batch * tokens * groups), 1))
        splits = triton.cdiv(most, each)
        shape = choose_shape(q, share)
        outs = q.new_empty(splits, *q.shape, dtype=torch.float32)
        lses = q.new_empty(splits, *q.shape[:3], dtype=torch.float32)
        _attend_to_blocks[batch * tokens, groups * triton.cdiv(share, shape.M), splits](
            q, k, v, chosen, first, *at_hand, outs, lses,
            k.stride(), v.stride(), spec.scale, tokens, triton.cdiv(most, splits),
            HEADS=heads, GROUPS=groups, D=head_size, WIDTH=padded_width(q), MOST=most,
            M=shape.M, N=shape.N, PRECISION=precision(q), CAP=spec.softcap, **shape.options,
        )  # fmt: skip
        return outs, lses

    def _find_tiles(self, q: Tensor, size: int, first: Tensor, stop: Tensor) -> Tiles:
        """Return the tiles, of up to `size` queries, of q (B, S, H, D): those of one row of the
        batch after another. The first query has position `first`. There are keys up to `stop`.
        """
        batch, tokens = q.shape[:2]
        row = torch.arange(batch, device=q.device).unsqueeze(1)
        begins = row * tokens + torch.arange(0, tokens, size, device=q.device)
        ends = torch.minimum(begins + size, (row + 1) * tokens)
        strides = (stop // self.sparse.kernel_stride).view(1, 1)
        columns = begins, ends, row * self._strides, strides
        table = torch.stack(torch.broadcast_tensors(*columns), -1).flatten(0, 1).int()
        every = torch.arange(batch * tokens, device=q.device)
        piece = ChoicePiece(slice(0, len(table)), slice(0, len(every)), self._blocks)
        return Tiles(table, every, first + every % tokens, (piece,))


class KeysAtHand(NamedTuple):
    """The places of the keys at hand.

    positions  (T,) int64, rising: their positions, also of those that are still to come
    starts     (blocks + 1,) int64: the number of keys before each block, and before the limit
    """

    positions: Tensor
    starts: Tensor

    @staticmethod
    def of(positions: Tensor, limit: int, block_size: int) -> KeysAtHand:
        """Return those of some positions below `limit`, on their device."""
        borders = torch.arange(0, limit + block_size, block_size, device=positions.device)
        return KeysAtHand(positions, torch.searchsorted(positions, borders))


@triton.jit(
    do_not_specialize=["tokens", "strides"], do_not_specialize_on_alignment=["keys", "first"]
)
def _add_keys(
    keys, first, recent, scored, normalizing, tokens, entries, strides,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys (B, S, entries) of some columns of a row of the batch, one token after another.

    recent              (B, _RECENT, entries) fp32: stride n is in n % _RECENT
    scored, normalizing (PARTS, B * strides, entries), (PARTS, B * strides // 4, entries)
    """
    batch = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < entries
    start, rows = tl.load(first), tl.num_programs(0) * wide(strides)
    sums = recent + batch * _RECENT * entries + column
    for n in range(tokens):
        stride, nth = (start + n) // STRIDE, (start + n) % STRIDE
        key = tl.load(keys + (batch * tokens + n) * entries + column, mask=inside, other=0.0)
        into = sums + stride % _RECENT * entries
        before = tl.load(into, mask=column < tl.where(nth > 0, entries, 0), other=0.0)
        tl.store(into, before + key.to(tl.float32), mask=inside)
        tl.debug_barrier()  # what is stored is read again
        if nth == STRIDE - 1:
            if stride >= 1:
                total = _sum_strides(sums, stride, entries, inside, 2, COLUMNS)
                at = scored + (batch * strides + stride - 1) * entries + column
                _store_halves(at, total / (2 * STRIDE), rows * entries, inside, PARTS)
            if (stride >= _RECENT - 1) & (stride % 4 == 3):
                total = _sum_strides(sums, stride, entries, inside, _RECENT, COLUMNS)
                at = (batch * strides + stride + 1 - _RECENT) // 4
                at = normalizing + at * entries + column
                _store_halves(at, total / (8 * STRIDE), rows // 4 * entries, inside, PARTS)


@triton.jit
def _sum_strides(sums, last, entries, inside, COUNT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of the last COUNT strides in their order, up to `last`."""
    total = tl.zeros((COLUMNS,), tl.float32)
    for n in tl.static_range(COUNT):
        at = sums + (last - (COUNT - 1 - n)) % _RECENT * entries
        total += tl.load(at, mask=inside, other=0.0)
    return total


@triton.jit
def _store_halves(at, x, distance, inside, PARTS: tl.constexpr):
    """Store numbers as `triton_choice.split` returns them, `distance` apart."""
    high = x.to(at.dtype.element_ty)
    tl.store(at, high, mask=inside)
    if PARTS == 2:
        tl.store(at + distance, (x - high.to(tl.float32)).to(at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "each"], do_not_specialize_on_alignment=["first"])
def _attend_to_blocks(
    q, k, v, chosen, first, positions, starts, outs, lses, k_strides, v_strides, scale, tokens,
    each,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    MOST: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Fill out and lse of `each` blocks of a query, for M heads of a kv head."""
    SHARE: tl.constexpr = HEADS // GROUPS
    query, split = tl.program_id(0), tl.program_id(2)
    group, part = tl.program_id(1) % GROUPS, tl.program_id(1) // GROUPS
    place = tl.load(first) + query % tokens
    row, column = part * M + tl.arange(0, M), tl.arange(0, WIDTH)
    inside = row < SHARE
    head = wide(query) * HEADS + group * SHARE + row
    exist = inside[:, None] & (column < D)[None, :]
    q_block = tl.load(q + head[:, None] * D + column[None, :], mask=exist, other=0.0)
    k_rows = token_at(k, k_strides, query // tokens, group, 0)
    v_rows = token_at(v, v_strides, query // tokens, group, 0)
    SCALED: tl.constexpr = CAP is not None
    factor = 1.0 if SCALED else scale * LOG2_E
    sums = tl.zeros((M, WIDTH), tl.float32)
    weights = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), -INFINITY, tl.float32)
    for nth in range(split * each, tl.minimum(split * each + each, MOST)):
        block = tl.load(chosen + (wide(query) * GROUPS + group) * MOST + nth)
        is_one = block >= 0
        begin = tl.load(starts + block, mask=is_one, other=0)
        end = tl.load(starts + block + 1, mask=is_one, other=0)
        for at in range(begin, end, N):
            key = at + tl.arange(0, N)
            own = tl.load(positions + key, mask=key < end, other=place + 1)
            seen = own <= place  # the first ones
            count = tl.sum(seen.to(tl.int32), 0)
            k_block = read(k_rows, k_strides, at, count, D, WIDTH, N, True)
            scores = scores_of(q_block, k_block, scale, PRECISION, CAP, SCALED)
            scores = tl.where(seen[None, :], scores, -INFINITY)
            probs, decay, weights, largest = weigh(scores, factor, weights, largest)
            v_block = read(v_rows, v_strides, at, count, D, WIDTH, N, True)
            sums = add_product(probs, v_block, sums * decay[:, None], PRECISION)
    rows = wide(tl.num_programs(0)) * HEADS
    store_part(outs, lses, split, rows, head, sums, weights, largest, inside, D, WIDTH)
