"""Sparse attention over ranks: blocks of keys that the data chose, and what is near.

Queries stay. Near are all keys of the first tokens of each document, which see no more blocks than
they may choose, and a window of later tokens. That is a mask, which any strategy computes as a
dense call. Far are the blocks beyond the window that the later tokens choose:

    choose    ranks gather all keys in spans of the sequence, and sum them up to compressed keys.
              Each rank then chooses blocks for its own queries.
    forward   ranks gather keys and values, span by span. Each computes its far part, which merges
              with the near part by lse.
    backward  ranks gather keys and values again, and return each span's gradients to its owners.

Queries may be only some of the sequence's tokens: those of a chunk, which attend to the keys up to
its end. Positions of queries are then those of their tokens among the keys.

A span has as many tokens as `span_bytes` of keys and values allow. Nearly every block is chosen by
some query of each rank, so sending only chosen blocks would save nothing. The choice depends
neither on ranks nor on spans (see `bmt_burst.sparse`).

Letters: B batch, S tokens of a rank, F of them that choose, T tokens of a span, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.kept import find_kept
from ..base.registry import Modules
from ..base.streams import send_to_device
from ..blocks import torch_far
from ..blocks.far import FarBlocks, FarKeys, packed_dtype
from ..blocks.spans import Spans
from ..kernels.packed import prepare_once
from ..merging.merge import stack_lse_delta
from ..ranks.rings import Rings
from ..sequence.span import Span
from ..strategies import Plan, Problem
from ..strategies.compute import Keys, QueryGradients, Tensors
from .choice import choose_by_score
from .compressed import CompressedKeys, compress, sum_strides
from .config import Constants
from .queries import Choosers, find_longest, own_keys

_FAR = Modules("bmt_burst.blocks", {"triton": "triton_far", "torch": "torch_far"})


class SparsePlan(Plan):
    """The part of one rank in sparse calls of one problem.

    Its forward takes the queries and keys by which blocks are chosen, or none to choose by q and k.
    It keeps the choice (B, F, G, topk) in `packed_dtype`: the first blocks of this rank's queries
    that choose, with all that are far.

    near        the dense plan of `near_mask`
    span_bytes  the most bytes of keys and values in a span, unless a stride of tokens is larger
    """

    def __init__(self, problem: Problem, sparse: Constants, rank: int, near: Plan, span_bytes: int):
        self.problem, self.rank, self.sparse = problem, rank, sparse
        self.near, self.span_bytes = near, span_bytes

    def lane_bytes(self, with_backward: bool) -> dict[str, int]:
        """Return the bytes of the near part or of a span, whichever is more."""
        problem, sizes, tokens = self.problem, self.problem.sizes, self._most_tokens
        entries = 2 * sizes.batch * sizes.kv_heads * sizes.head_size
        visit = min(tokens, problem.mask.kv_len) * entries * sizes.dtype.itemsize
        column = min(tokens, problem.outer * problem.most_keys)  # at one place of all hosts
        returned = problem.inner * column * entries * sizes.partial.itemsize
        spans = {"visit": visit, "return": returned * with_backward}
        near = self.near.lane_bytes(with_backward)
        return {lane: max(nbytes, near[lane]) for lane, nbytes in spans.items()}

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        super().reserve(rings, device, with_backward)
        self.near.reserve(rings, device, with_backward)

    def choose(self, rings: Rings, q: Tensor, k: Tensor) -> Tensor:
        """Choose blocks for this rank's q (B, S, H, D), by the k (B, S, G, D) of all ranks."""

        def choose() -> Tensor:
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                keys = self._compress(rings, k)
                return torch.stack([self._choose_row(*row) for row in zip(q, keys, strict=True)])

        # a recomputation takes the choice of the first run
        return find_kept(choose, "sparse attention chooses its blocks")

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        chosen = self.choose(rings, *(inputs or (q, k)))
        near, near_lse, _ = self.near.forward(rings, q, k, v)
        # With one span, results have q's dtype. Sums of several spans are kept wide.
        dtype = q.dtype if len(self.spans.spans) == 1 else near_lse.dtype
        # the far part is merged into these in place
        copy = not self.problem.kernel.writes_new_memory
        out, lse = near.to(dtype, copy=copy), near_lse.to(near_lse.dtype, copy=copy)
        del near, near_lse
        for rows in self._gather_far(rings, k, v, chosen):
            for row, far in enumerate(rows):
                find_kernels(q[row], far).add_far_outputs(q[row], far, out[row], lse[row])
        return out.to(q.dtype), lse, (chosen,)

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, tuple[None, ...]]:
        [chosen], q, dout, lse = kept, queries.q, queries.dout, queries.lse
        *near, _ = self.near.backward(rings, queries, keys, (), ())
        dq = near[0].to(q.dtype if len(self.spans.spans) == 1 else lse.dtype)  # as in the forward
        dk, dv = (x.to(lse.dtype) for x in near[1:])
        del near
        assert queries.out is not None, "a call has out"
        lse_delta = stack_lse_delta(queries.out, dout, lse)
        for number, rows in enumerate(self._gather_far(rings, keys.k, keys.v, chosen)):
            with self.spans.returning(rings, (dk, dv), number, self.problem.sizes.partial) as grads:
                for row, far in enumerate(rows):
                    tensors = q[row], far, lse_delta[row], dq[row], *(x[row] for x in grads)
                    find_kernels(q[row], far).add_far_gradients(dout[row], *tensors)
        none = (None,) * len(inputs)  # no gradient flows through the choice
        if keys.dk is None:
            dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        return dq.to(q.dtype), dk, dv, none

    def _gather_far(
        self, rings: Rings, k: Tensor, v: Tensor, chosen: Tensor
    ) -> Iterator[list[FarKeys]]:
        """Yield the keys of each span, as the queries of each row attend to them."""
        ends, size = self._ends(chosen.device), self.sparse.block_size
        tokens, scale = self.problem.mask.kv_len, self.problem.spec.scale
        blocks = [FarBlocks.of_choice(row.int(), *ends, size, tokens) for row in chosen]
        for number, (first, _) in enumerate(self.spans.spans):
            rows = zip(*self.spans.gather(rings, [k, v], number), blocks, strict=True)
            yield [FarKeys(k, v, of_row, first, scale) for k, v, of_row in rows]

    def _compress(self, rings: Rings, k: Tensor) -> list[CompressedKeys]:
        """Return the compressed keys of each row, for the documents of this rank's `choosers`."""
        sums = [k.new_empty(len(k), 0, *k.shape[2:], dtype=accumulator_dtype(k.dtype))]
        for number in range(len(self.spans.spans)):
            [whole] = self.spans.gather(rings, [k], number)
            strides = self._strides(number, k.device)
            if len(strides):
                at_any = whole.unfold(1, self.sparse.kernel_stride, 1).movedim(-1, 2)
                tokens = at_any.index_select(1, strides).flatten(1, 2)
                sums.append(torch.stack([sum_strides(row, self.sparse) for row in tokens]))
        return [compress(row, self.sparse) for row in torch.cat(sums, 1)]

    def _choose_row(self, q: Tensor, keys: CompressedKeys) -> Tensor:
        """Return the chosen blocks of a row's q (S, H, D) that may be far: (F, G, topk)."""
        chosen = choose_by_score(q, self.choosers, keys, self.sparse, self.problem.spec.scale)
        # The last `window_blocks` places of a list have blocks that lie in the window as a whole.
        blocks = -(-find_longest(self.problem.mask) // self.sparse.block_size)
        return chosen[..., : self.sparse.topk].to(packed_dtype(blocks), copy=True)

    @functools.cached_property
    def choosers(self) -> Choosers:
        """This rank's queries that choose."""
        return Choosers.of_tokens(self._positions, self.problem.mask, self.sparse)

    @functools.cached_property
    def _positions(self) -> Tensor:
        """The positions of this rank's queries among the keys: (S,) int64."""
        return own_keys(self.problem.layout.positions(self.rank), self.problem.mask)

    def _ends(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return `starts` and `tokens` of `choosers`, and where far parts of tokens end, (S,)."""

        def make() -> tuple[Tensor, ...]:
            stops = self._positions - self.sparse.window_size
            parts = self.choosers.starts(), self.choosers.tokens, stops
            return tuple(send_to_device(x, device) for x in parts)

        starts, tokens, stops = prepare_once(self.choosers, ("ends",), device, make)
        return starts, tokens, stops

    def _strides(self, number: int, device: torch.device) -> Tensor:
        """Return the first tokens of the strides of `choosers` in a span, counted from there."""

        def make() -> Tensor:
            strides = self.choosers.strides(self.sparse.kernel_stride)
            start, stop = self.spans.spans[number]
            inside = strides[(strides >= start) & (strides < stop)] - start
            return send_to_device(inside, device)

        return prepare_once(self.choosers, ("strides", number), device, make)

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans that are gathered in turn. None ends within a stride of a document."""
        problem, stride = self.problem, self.sparse.kernel_stride
        cut = _cut_sequence(problem.mask.transposed.parts, self._most_tokens, stride)
        return Spans(problem.kv_layout or problem.layout, self.rank, problem.inner, cut)

    @property
    def _most_tokens(self) -> int:
        """The most tokens of a span."""
        sizes = self.problem.sizes
        bytes_of_token = 2 * sizes.batch * sizes.kv_heads * sizes.head_size * sizes.dtype.itemsize
        return max(self.span_bytes // bytes_of_token, self.sparse.kernel_stride)


def find_kernels(q: Tensor, far: FarKeys) -> ModuleType:
    """Return Triton's module for tensors on GPUs, unless of fp64 or too large heads or blocks."""
    found = _FAR.find(q)
    fits = found is torch_far or found.fits(q, far.k, far.blocks.block_size)
    return found if fits else torch_far


def _cut_sequence(parts: Sequence[Span], most: int, stride: int) -> tuple[Span, ...]:
    """Cut documents into spans of at most `most` tokens. None ends within a document's stride."""
    cuts = [0]
    for start, stop in parts:
        while stop - cuts[-1] > most:
            cuts.append(start + (cuts[-1] + most - start) // stride * stride)
    return tuple(itertools.pairwise((*cuts, parts[-1][1])))
