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
from ..merging.merge import Outputs, empty_lse
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

    def queries(self, x: Tensor) -> Tensor:
        """Return a view of the blocks' queries in x (B, S, ...): (B, count, tokens, ...)."""
        return self._cut(x, self.q, self.q_step)

    def keys(self, x: Tensor) -> Tensor:
        """Return a view of the blocks' keys in x (B, T, ...): (B, count, tokens, ...)."""
        return self._cut(x, self.kv, self.kv_step)

    def _cut(self, x: Tensor, first: Span, step: int) -> Tensor:
        if self.count == 1:
            return x[:, slice(*first)].unsqueeze(1)
        tokens = x[:, first[0] : first[1] + (self.count - 1) * step]
        return tokens.unfold(1, length(first), step).movedim(-1, 2)

    def stack(self, x: Tensor) -> Tensor:
        """Stack tokens (B, count, tokens, ...) along the batch, in the order that makes the blocks
        causal: (B count, tokens, ...).
        """
        return self._turn(x.flatten(0, 1))

    def unstack(self, x: Tensor) -> Tensor:
        """Return the tensors that `stack` got from its result."""
        return self._turn(x).unflatten(0, (-1, self.count))

    def _turn(self, x: Tensor) -> Tensor:
        return x.flip(1) if self.shape is BlockKind.REVERSED else x


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
        lse = empty_lse(q).fill_(-torch.inf)
        for blocks in blocks_of(call):
            views = blocks.queries(q), blocks.keys(k), blocks.keys(v)
            causal = blocks.shape is not BlockKind.FULL
            _merge(out, lse, blocks, *self.block_forward(*map(blocks.stack, views), causal, spec))
        return out.to(self.partial_dtype(q.dtype)), lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        if call.is_whole:
            return self.block_backward(dout, q, k, v, out, lse, call.is_causal, spec)
        wide = accumulator_dtype(q.dtype)
        sums = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
        for blocks in blocks_of(call):
            of_queries = (blocks.stack(blocks.queries(x)) for x in (dout, q, out, lse.mT))
            keys, values = (blocks.stack(blocks.keys(x)) for x in (k, v))
            douts, queries, outs, lses = of_queries
            tensors = douts, queries, keys, values, outs, lses.mT
            grads = self.block_backward(*tensors, blocks.shape is not BlockKind.FULL, spec)
            dq, dk, dv = sums
            places = blocks.queries(dq), blocks.keys(dk), blocks.keys(dv)
            for place, grad in zip(places, grads, strict=True):
                place.add_(blocks.unstack(grad))
        return tuple(total.to(self.partial_dtype(q.dtype)) for total in sums)


def blocks_of(call: KernelCall) -> tuple[Blocks, ...]:
    """Return blocks that contain each visible pair of a call once."""
    if "blocks" not in call.prepared:
        blocks = [block for tile in call.tiles for block in _cut_tile(*tile, call.left, call.right)]
        call.prepared["blocks"] = tuple(_join_equal(blocks))
    return call.prepared["blocks"]


def _cut_tile(q: Span, kv: Span, left: int | None, right: int | None) -> Iterator[Blocks]:
    """Return the blocks of a tile. left and right are as in `KernelCall`."""
    more = length(kv) - length(q)
    # Counted from the tile's corner, row a sees column b if low <= b - a <= high.
    high = length(kv) if right is None else more + right
    # Without a left bound, low is below all pairs, so that all rows are one group.
    low = min(high, 0) - length(q) if left is None else more - left
    # Each group has as many rows as the band is wide, so all see the first key of its last row.
    size = high - low + 1
    for start in range(0, length(q), size):
        stop = min(start + size, length(q))
        middle = min(max(kv[0] + stop - 1 + low, kv[0]), kv[1])  # that key
        rows, before, after = (q[0] + start, q[0] + stop), (kv[0], middle), (middle, kv[1])
        # low <= b - a is b - a <= turned, if both count backwards from the last row and the last
        # key of `before`.
        turned = length(before) - length(rows) - low - start
        for shape, queries, keys in _cut_at_edge(_turn(rows), _turn(before), turned):
            shape = BlockKind.REVERSED if shape is BlockKind.CAUSAL else shape
            yield Blocks(shape, _turn(queries), _turn(keys))
        for block in _cut_at_edge(rows, after, high + start - length(before)):
            yield Blocks(*block)


def _cut_at_edge(q: Span, kv: Span, high: int) -> Iterator[tuple[BlockKind, Span, Span]]:
    """Return the blocks of a rectangle in which row a sees column b if b - a <= high, counted from
    its corner.
    """
    first = min(max(q[0] - high, q[0]), q[1])  # the first row that sees any key
    edge = min(max(kv[0] + high, kv[0]), kv[1])  # the first key that not all of these rows see
    side = min(q[1] - first, kv[1] - edge)
    for shape, rows, columns in (
        (BlockKind.FULL, (first, q[1]), (kv[0], edge)),
        (BlockKind.CAUSAL, (first, first + side), (edge, edge + side)),
        (BlockKind.FULL, (first + side, q[1]), (edge, kv[1])),
    ):
        if length(rows) and length(columns):
            yield shape, rows, columns


def _turn(span: Span) -> Span:
    """Return a span of tokens that are counted backwards."""
    return -span[1], -span[0]


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
    places = blocks.queries(out), blocks.queries(lse.mT)
    parts = blocks.unstack(part), blocks.unstack(part_lse.mT)
    # One row of the batch at a time: with tokens between blocks left out, batch and block cannot
    # be one dimension of a view.
    for out_at, lse_at, part_at, part_lse_at in zip(*places, *parts, strict=True):
        spans = [(0, out_at.shape[1])]
        before, more = (spans, out_at, lse_at.mT.clone()), (spans, part_at, part_lse_at.mT)
        Outputs(out_at, lse_at.mT, parts=[before, more]).result()
