"""Any `KernelCall` with kernels that compute only full rectangles and causal squares.

A tile whose band has no left edge is cut into at most two rectangles and a causal square:

    # # . .       # #       . .
    # # # .   =   # #   +   # .
    # # # #       # #       # #

Such kernels know no windows, which have a left edge. On GPUs the Triton kernel computes those, on
CPUs the reference, some rows at a time, so that no mask of a whole tile is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from ..merging.merge import Outputs, Sum
from ..merging.surrogate import surrogate_out
from ..sequence.span import Span, length
from ..sequence.tile import KernelCall
from . import Kernel, load

_ROWS = 256  # queries of a window that the reference computes at once


class Block(NamedTuple):
    """Queries and keys of a call, and the call of one tile that computes their pairs."""

    q: Span
    kv: Span
    call: KernelCall


class PlainKernel(Kernel):
    """A kernel that computes blocks of at least `fewest_keys`. The reference computes others."""

    fewest_keys: int = 1

    @abstractmethod
    def block_forward(self, q, k, v, causal, spec):
        """Compute `Kernel.forward` of a full block, or of a causal square."""

    @abstractmethod
    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        """Compute `Kernel.backward` of such a block. `out` is never None."""

    def forward(self, q, k, v, call, spec):
        if self._computes(call):
            return self.block_forward(q, k, v, call.is_causal, spec)
        if q.is_cuda and call.left is not None:
            return load("triton").forward(q, k, v, call, spec)
        # A query is in two blocks at most. So all partial results may wait for one merge.
        merged = Outputs(q.shape, q.dtype, q.device, limit=None)
        for rows, columns, part in blocks_of(call):
            here, there = slice(*rows), slice(*columns)
            tensors = q[:, here], k[:, there], v[:, there]
            merged.add([rows], *self._kernel_of(part).forward(*tensors, part, spec))
        out, lse = merged.result()
        return out.contiguous(), lse

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        if q.is_cuda and call.left is not None:
            return load("triton").backward(dout, q, k, v, out, lse, delta, call, spec)
        out = surrogate_out(dout, delta) if out is None else out
        if self._computes(call):
            return self.block_backward(dout, q, k, v, out, lse, call.is_causal, spec)
        sums = [Sum(x.shape, x.dtype, x.device, limit=None) for x in (q, k, v)]
        for rows, columns, part in blocks_of(call):
            here, there = slice(*rows), slice(*columns)
            tensors = dout[:, here], q[:, here], k[:, there], v[:, there], out[:, here]
            grads = self._kernel_of(part).backward(*tensors, lse[:, :, here], None, part, spec)
            for total, span, grad in zip(sums, (rows, columns, columns), grads, strict=True):
                total.add([span], grad)
        return tuple(total.result()[0].contiguous() for total in sums)

    def _kernel_of(self, part: KernelCall) -> Kernel:
        return self if self._computes(part) else load("reference")

    def _computes(self, call: KernelCall) -> bool:
        return call.is_whole and call.kv_tokens >= self.fewest_keys


def blocks_of(call: KernelCall) -> tuple[Block, ...]:
    """Return blocks that contain each visible pair of a call once."""
    if "blocks" not in call.prepared:
        cut = _cut_at_edge if call.left is None else _cut_window
        blocks = [block for tile in call.tiles for block in cut(*tile, call)]
        call.prepared["blocks"] = tuple(blocks)
    return call.prepared["blocks"]


def _cut_at_edge(q: Span, kv: Span, call: KernelCall) -> Iterator[Block]:
    """Yield full and causal blocks of a tile without a left edge."""
    # Counted from the tile's corner, row a sees column b if b - a <= high.
    high = length(kv) if call.right is None else length(kv) - length(q) + call.right
    first = min(max(q[0] - high, q[0]), q[1])  # the first row that sees any key
    edge = min(max(kv[0] + high, kv[0]), kv[1])  # the first key that not all of these rows see
    side = min(q[1] - first, kv[1] - edge)
    for causal, rows, columns in (
        (False, (first, q[1]), (kv[0], edge)),
        (True, (first, first + side), (edge, edge + side)),
        (False, (first + side, q[1]), (edge, kv[1])),
    ):
        if length(rows) and length(columns):
            yield Block(rows, columns, KernelCall.whole(length(rows), length(columns), causal))


def _cut_window(q: Span, kv: Span, call: KernelCall) -> Iterator[Block]:
    """Yield some rows of a tile at a time, with the keys that they see."""
    assert call.left is not None, "a window has a left edge"
    for start in range(q[0], q[1], _ROWS):
        rows = start, min(start + _ROWS, q[1])
        # `Kernel` counts rows and columns from the last one.
        first, last = kv[1] + rows[0] - q[1], kv[1] + rows[1] - q[1]
        stop = kv[1] if call.right is None else min(kv[1], last + call.right)
        columns = max(kv[0], first - call.left), stop
        if length(columns):
            ahead = last - stop  # of the last key, the key that the last row is aligned with
            right = None if call.right is None else call.right + ahead
            tile = (0, length(rows)), (0, length(columns))
            part = KernelCall(length(rows), length(columns), (tile,), call.left - ahead, right)
            yield Block(rows, columns, part)
