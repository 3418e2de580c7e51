"""A plan of attention that is near by a mask, and far by a choice of blocks.

Queries stay. Near is a mask, which any strategy computes as a dense call. Far are blocks of keys
that the data chose, beyond what is near:

    choose    ranks gather what they choose by, span by span. Each chooses for its own queries.
    forward   ranks gather keys and values, span by span. Each computes its far part, which merges
              with the near part by lse.
    backward  ranks gather keys and values again, and return each span's gradients to its owners.

Queries may be only some of the sequence's tokens, those of a chunk. Their positions are those among
the keys. A span has as many tokens as `span_bytes` of keys and values allow. Nearly every block is
chosen by some query of each rank, so sending only chosen blocks would save nothing.

Letters: B batch, S tokens of a rank, F of them that choose, T tokens of a span, H query heads, G kv
heads, D head size.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..base.kept import find_kept
from ..base.ranges import in_range
from ..base.registry import Modules
from ..merging.merge import stack_lse_delta
from ..ranks.rings import Rings
from ..sequence.span import Span
from ..strategies import Plan, Problem
from ..strategies.compute import Keys, QueryGradients, Tensors
from .documents import own_keys
from .far import FarBlocks, FarKeys
from .spans import Spans

_FAR = Modules(__package__, {"triton": "triton_far", "torch": "far"})


class BlockPlan(Plan):
    """The part of one rank in calls of one problem. A subclass chooses.

    Its forward takes the tensors by which blocks are chosen, or none to choose by q and k. It keeps
    the choice: (B, F, G or H, N), the blocks of this rank's queries that choose, counted from the
    start of a query's document, in which -1 is none.

    near        the dense plan of what is near
    block_size  tokens of a block
    stride      tokens that no span cuts, counted from the start of a document
    span_bytes  the most bytes of keys and values in a span, unless a stride of tokens is larger
    """

    def __init__(
        self, problem: Problem, rank: int, near: Plan, block_size: int, stride: int, span_bytes: int
    ):
        self.problem, self.rank, self.near = problem, rank, near
        self.block_size, self.stride, self.span_bytes = block_size, stride, span_bytes

    @abstractmethod
    def choose_rows(self, rings: Rings, q: Tensor, k: Tensor) -> Tensor:
        """Choose blocks for this rank's q (B, S, H, D), by the k (B, S, G, D) of all ranks."""

    @abstractmethod
    def find_ends(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the documents of the queries that choose start in the sequence, (F,) int64,
        which of this rank's tokens these queries are, (F,) int64, rising, and where the far part of
        each token ends, (S,) int64.
        """

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
        """Return `choose_rows`. A recomputation takes the choice of the first run."""

        def choose() -> Tensor:
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                return in_range("choice", self.choose_rows, rings, q, k)

        return find_kept(choose, "sparse attention chooses its blocks")

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        chosen = self.choose(rings, *(inputs or (q, k)))
        near, near_lse, _ = self.near.forward(rings, q, k, v)
        dtype = self._dtype(q, near_lse)
        # the far part is merged into these in place
        copy = not self.problem.kernel.writes_new_memory
        out, lse = near.to(dtype, copy=copy), near_lse.to(near_lse.dtype, copy=copy)
        del near, near_lse
        for rows in self._gather_far(rings, k, v, chosen):
            for row, far in enumerate(rows):
                kernel = find_kernels(q[row], far).add_far_outputs
                in_range("kernel", kernel, q[row], far, out[row], lse[row])
        return out.to(q.dtype), lse, (chosen,)

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, tuple[None, ...]]:
        [chosen], q, dout, lse = kept, queries.q, queries.dout, queries.lse
        *near, _ = self.near.backward(rings, queries, keys, (), ())
        dq = near[0].to(self._dtype(q, lse))
        dk, dv = (x.to(lse.dtype) for x in near[1:])
        del near
        assert queries.out is not None, "a call has out"
        lse_delta = stack_lse_delta(queries.out, dout, lse)
        for number, rows in enumerate(self._gather_far(rings, keys.k, keys.v, chosen)):
            with self.spans.returning(rings, (dk, dv), number, self.problem.sizes.partial) as grads:
                for row, far in enumerate(rows):
                    tensors = q[row], far, lse_delta[row], dq[row], *(x[row] for x in grads)
                    kernel = find_kernels(q[row], far).add_far_gradients
                    in_range("kernel", kernel, dout[row], *tensors)
        none = (None,) * len(inputs)  # no gradient flows through the choice
        if keys.dk is None:
            dk, dv = dk.to(q.dtype), dv.to(q.dtype)
        return dq.to(q.dtype), dk, dv, none

    def _dtype(self, q: Tensor, lse: Tensor) -> torch.dtype:
        """Return the dtype of sums over spans, which are kept wide if there are several."""
        return q.dtype if len(self.spans.spans) == 1 else lse.dtype

    def _gather_far(
        self, rings: Rings, k: Tensor, v: Tensor, chosen: Tensor
    ) -> Iterator[list[FarKeys]]:
        """Yield the keys of each span, as the queries of each row attend to them."""
        ends, size = self.find_ends(chosen.device), self.block_size
        tokens, scale = self.problem.mask.kv_len, self.problem.spec.scale
        blocks = [FarBlocks.of_choice(row.int(), *ends, size, tokens) for row in chosen]
        for number, (first, _) in enumerate(self.spans.spans):
            keys = in_range("fetch", self.spans.gather, rings, [k, v], number)
            rows = zip(*keys, blocks, strict=True)
            yield [FarKeys(k, v, of_row, first, scale) for k, v, of_row in rows]

    @functools.cached_property
    def positions(self) -> Tensor:
        """The positions of this rank's queries among the keys: (S,) int64."""
        return own_keys(self.problem.layout.positions(self.rank), self.problem.mask)

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans that are gathered in turn. None ends within a stride of a document."""
        problem = self.problem
        cut = _cut_sequence(problem.mask.transposed.parts, self._most_tokens, self.stride)
        return Spans(problem.kv_layout or problem.layout, self.rank, problem.inner, cut)

    @property
    def _most_tokens(self) -> int:
        """The most tokens of a span."""
        sizes = self.problem.sizes
        bytes_of_token = 2 * sizes.batch * sizes.kv_heads * sizes.head_size * sizes.dtype.itemsize
        return max(self.span_bytes // bytes_of_token, self.stride)


def find_kernels(q: Tensor, far: FarKeys) -> ModuleType:
    """Return Triton's module for tensors on GPUs, unless of fp64, too large heads or blocks, or a
    choice for each query head.
    """
    found, by_torch, blocks = _FAR.find(q), _FAR.load("torch"), far.blocks
    is_torch = found is by_torch or blocks.starts.shape[1] != far.k.shape[1]
    return by_torch if is_torch or not found.fits(q, far.k, blocks.block_size) else found


def _cut_sequence(parts: Sequence[Span], most: int, stride: int) -> tuple[Span, ...]:
    """Cut documents into spans of at most `most` tokens. None ends within a document's stride."""
    cuts = [0]
    for start, stop in parts:
        while stop - cuts[-1] > most:
            cuts.append(start + (cuts[-1] + most - start) // stride * stride)
    return tuple(itertools.pairwise((*cuts, parts[-1][1])))
