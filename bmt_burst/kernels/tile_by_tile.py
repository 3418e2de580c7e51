"""Any `KernelCall` with kernels that compute only full rectangles and causal squares.

If one edge of the band cuts a tile, the tile is cut into at most two rectangles and a causal
square. A left edge becomes a right edge if queries and keys are both reversed: then its square is
causal. If both edges cut a tile, it is cut into groups of rows that all see one key. Left of this
key only the left edge matters, right of it only the right edge.

    # # # . .       # #       # . .
    . # # # .   =   . #   +   # # .
    . . # # #       . .       # # #

Equal blocks at equal distances, as in a window, are one call of the kernel, stacked along the
batch. Memory is O(S + T): no mask is made, and partial results are added one after the other.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..merging.merge import Outputs
from ..sequence.span import Span, length
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel

_MOST_BLOCKS = 4096  # blocks of one call: kernels limit the batch


class BlockKind(Enum):
    """The keys b that query a of a block sees."""

    FULL = "all"
    CAUSAL = "b <= a"
    REVERSED = "b >= a"


@dataclass(frozen=True)
class Blocks:
    """Equal blocks: the first is q x kv, each next one is a step further on both sides."""

    shape: BlockKind
    q: Span
    kv: Span
    count: int = 1
    q_step: int = 0
    kv_step: int = 0


class PlainKernel(Kernel):
    """A kernel that computes blocks. It does not accept delta."""

    @abstractmethod
    def block_forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, spec: Spec
    ) -> tuple[Tensor, Tensor]:
        """Compute `Kernel.forward` of a block in which every query sees every key.

        If `causal`, S is T, and query i sees keys 0 to i.
        """

    @abstractmethod
    def block_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        spec: Spec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `Kernel.backward` of such a block."""

    def forward(self, q, k, v, call, spec):
        if call.is_whole:
            return self.block_forward(q, k, v, call.is_causal, spec)
        out = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
        lse = torch.full(
            (q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=out.dtype, device=q.device
        )
        for blocks in blocks_of(call):
            queries, keys, values = (
                _stack_queries(q, blocks),
                _stack_keys(k, blocks),
                _stack_keys(v, blocks),
            )
            part, part_lse = self.block_forward(
                queries, keys, values, blocks.shape is not BlockKind.FULL, spec
            )
            _merge(out, lse, blocks, part, part_lse)
        return out.to(self.partial_dtype(q.dtype)), lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        if call.is_whole:
            return self.block_backward(dout, q, k, v, out, lse, call.is_causal, spec)
        sums = [
            torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device)
            for x in (q, k, v)
        ]
        for blocks in blocks_of(call):
            douts, queries, outs = (_stack_queries(x, blocks) for x in (dout, q, out))
            keys, values = _stack_keys(k, blocks), _stack_keys(v, blocks)
            lses = _stack_queries(lse.transpose(1, 2), blocks).transpose(1, 2)
            tensors = douts, queries, keys, values, outs, lses
            grads = self.block_backward(*tensors, blocks.shape is not BlockKind.FULL, spec)
            for total, grad, cut in zip(
                sums, grads, (_cut_queries, _cut_keys, _cut_keys), strict=True
            ):
                place = cut(total, blocks)
                place.add_(_reverse_if_needed(grad, blocks, 1).unflatten(0, place.shape[:2]))
        return tuple(
            total.to(self.partial_dtype(x.dtype)) for total, x in zip(sums, (q, k, v), strict=True)
        )


def blocks_of(call: KernelCall) -> tuple[Blocks, ...]:
    """Return blocks that contain each visible pair of a call once."""
    if "blocks" not in call.prepared:
        blocks = [block for tile in call.tiles for block in _cut_tile(*tile, call.left, call.right)]
        call.prepared["blocks"] = tuple(_join_equal(blocks))
    return call.prepared["blocks"]


def _cut_tile(q: Span, kv: Span, left: int | None, right: int | None) -> Iterator[Blocks]:
    """Return the blocks of a tile. left and right are as in `KernelCall`."""
    more = length(kv) - length(q)
    low, high = None if left is None else more - left, None if right is None else more + right
    if low is None or high is None:
        yield from _cut_at_edge(q, kv, low, high)
        return
    # Each group has as many rows as the band is wide, so all see the first key of its last row.
    for start in range(0, length(q), high - low + 1):
        stop = min(start + high - low + 1, length(q))
        middle = min(max(kv[0] + stop - 1 + low, kv[0]), kv[1])  # that key
        rows = q[0] + start, q[0] + stop
        yield from _cut_at_edge(rows, (kv[0], middle), low + start, None)
        yield from _cut_at_edge(rows, (middle, kv[1]), None, high + start - (middle - kv[0]))


def _cut_at_edge(q: Span, kv: Span, low: int | None, high: int | None) -> Iterator[Blocks]:
    """Return the blocks of a rectangle in which b - a >= low, or b - a <= high, is visible.

    a and b are counted from its corner. One of low and high is None.
    """
    if low is not None:
        for block in _cut_at_edge(
            (-q[1], -q[0]), (-kv[1], -kv[0]), None, length(kv) - length(q) - low
        ):
            shape = BlockKind.REVERSED if block.shape is BlockKind.CAUSAL else block.shape
            yield replace(
                block, shape=shape, q=(-block.q[1], -block.q[0]), kv=(-block.kv[1], -block.kv[0])
            )
        return
    if high is None:
        high = length(kv)
    first = min(max(q[0] - high, q[0]), q[1])  # the first row that sees any key
    edge = min(max(kv[0] + high, kv[0]), kv[1])  # the first key that not all of these rows see
    side = min(q[1] - first, kv[1] - edge)
    for shape, rows, columns in (
        (BlockKind.FULL, (first, q[1]), (kv[0], edge)),
        (BlockKind.CAUSAL, (first, first + side), (edge, edge + side)),
        (BlockKind.FULL, (first + side, q[1]), (edge, kv[1])),
    ):
        if length(rows) and length(columns):
            yield Blocks(shape, rows, columns)


def _join_equal(blocks: list[Blocks]) -> Iterator[Blocks]:
    """Join single blocks of equal shape and size that lie at equal distances."""
    kinds: dict[tuple[BlockKind, int, int], list[Blocks]] = {}
    for block in blocks:
        found = kinds.setdefault((block.shape, length(block.q), length(block.kv)), [])
        if not found or (joined := _join_blocks(found[-1], block)) is None:
            found.append(block)
        else:
            found[-1] = joined
    for found in kinds.values():
        yield from found


def _join_blocks(blocks: Blocks, block: Blocks) -> Blocks | None:
    """Return `blocks` with one more, or None if it is at another distance or overlaps them."""
    q_step = block.q[0] - blocks.q[0] - (blocks.count - 1) * blocks.q_step
    kv_step = block.kv[0] - blocks.kv[0] - (blocks.count - 1) * blocks.kv_step
    if q_step < length(block.q) or kv_step < length(block.kv) or blocks.count == _MOST_BLOCKS:
        return None
    if blocks.count > 1 and (q_step, kv_step) != (blocks.q_step, blocks.kv_step):
        return None
    return replace(blocks, count=blocks.count + 1, q_step=q_step, kv_step=kv_step)


def _merge(out: Tensor, lse: Tensor, blocks: Blocks, part: Tensor, part_lse: Tensor) -> None:
    """Merge the results of blocks into out and lse, in place.

    part is (B count, tokens, H, D), part_lse (B count, H, tokens).
    """
    places = _cut_queries(out, blocks), _cut_queries(lse.transpose(1, 2), blocks).transpose(2, 3)
    parts = _reverse_if_needed(part, blocks, 1), _reverse_if_needed(part_lse, blocks, 2)
    by_row = (x.unflatten(0, place.shape[:2]) for x, place in zip(parts, places, strict=True))
    # One row of the batch at a time: with tokens between blocks left out, batch and block cannot
    # be one dimension of a view.
    for out_at, lse_at, part_at, part_lse_at in zip(*places, *by_row, strict=True):
        spans = [(0, out_at.shape[1])]
        Outputs(
            out_at, lse_at, parts=[(spans, out_at, lse_at.clone()), (spans, part_at, part_lse_at)]
        ).result()


def _stack_queries(x: Tensor, blocks: Blocks) -> Tensor:
    """Return the queries (B count, tokens, ...) of blocks, in the order that makes them causal."""
    return _reverse_if_needed(_cut_queries(x, blocks).flatten(0, 1), blocks, 1)


def _stack_keys(x: Tensor, blocks: Blocks) -> Tensor:
    """Return the keys (B count, tokens, ...) of blocks, in the order that makes them causal."""
    return _reverse_if_needed(_cut_keys(x, blocks).flatten(0, 1), blocks, 1)


def _reverse_if_needed(x: Tensor, blocks: Blocks, tokens: int) -> Tensor:
    """Reverse the dimension `tokens` of x if that makes its blocks causal, or back."""
    return x.flip(tokens) if blocks.shape is BlockKind.REVERSED else x


def _cut_queries(x: Tensor, blocks: Blocks) -> Tensor:
    """Return a view of the queries of blocks, (B, count, tokens, ...)."""
    return _cut_ranges(x, blocks.q, blocks.count, blocks.q_step)


def _cut_keys(x: Tensor, blocks: Blocks) -> Tensor:
    """Return a view of the keys of blocks, (B, count, tokens, ...)."""
    return _cut_ranges(x, blocks.kv, blocks.count, blocks.kv_step)


def _cut_ranges(x: Tensor, first: Span, count: int, step: int) -> Tensor:
    """Return a view (B, count, tokens, ...) of `count` ranges of x (B, S, ...), `step` apart."""
    if count == 1:
        return x[:, slice(*first)].unsqueeze(1)
    tokens = x[:, first[0] : first[1] + (count - 1) * step]
    return tokens.unfold(1, length(first), step).movedim(-1, 2)
