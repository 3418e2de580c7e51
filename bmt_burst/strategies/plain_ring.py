"""The ring in its simplest form: no overlap, no passes, no choice of what to send.

Each rank keeps its queries. In `size` hops, every block of keys and values visits every rank. At
each hop, a rank computes its queries with the block that it holds, and then sends the block to the
next rank. In the backward, a block is sent with its gradients, to which each rank adds its share.
After `size` hops the gradients are complete, and back at the owner of the block.

            hop 0        hop 1        hop 2
    rank 0  q0 x kv0     q0 x kv2     q0 x kv1
    rank 1  q1 x kv1     q1 x kv0     q1 x kv2
    rank 2  q2 x kv2     q2 x kv1     q2 x kv0

`strategies/ring` computes the same and hides the sends behind the kernels.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.ranges import in_range
from ..merging.merge import Outputs
from ..merging.parts import tokens_at
from ..ranks.rings import Rings
from ..sequence.gathered_calls import GatheredCall, kernel_calls
from ..sequence.span import in_turn
from ..sequence.tiling import Tiling
from ..transport import LANES
from . import DENSE, Plan, Problem, Strategy
from .compute import Keys, Queries, QueryGradients, Tensors


class PlainRing(Strategy):
    name = "plain-ring"
    takes_hosts = takes_scorings = False

    def plan(self, problem: Problem, rank: int) -> PlainRingPlan:
        return PlainRingPlan(problem, rank)


class PlainRingPlan(Plan):
    """The hops of one rank."""

    def __init__(self, problem: Problem, rank: int):
        self.problem, self.rank, self.size = problem, rank, problem.inner

    def lane_bytes(self, with_backward: bool) -> dict[str, int]:
        return dict.fromkeys(LANES, 0)  # `exchange` receives into new tensors

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        queries = Queries(q)
        attention = DENSE.forward(self.problem, q, inputs)
        merged = Outputs(q.shape, q.dtype, q.device)
        block = [k.contiguous(), v.contiguous()]
        for hop in range(self.size):
            for [part] in attention.compute(self._calls[hop], queries, Keys(*block)):
                merged.add(*part)
            if hop + 1 < self.size:
                block = in_range("hop", self._pass_on, rings, block, hop)
        out, lse = merged.result()
        return out, lse, ()

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        q, k, v = queries.q, keys.k, keys.v
        attention = DENSE.backward(self.problem, queries, inputs, kept)
        wide = accumulator_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=wide)
        block = [k.contiguous(), v.contiguous()]
        block += [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v)]
        for hop in range(self.size):
            here, (dk, dv) = Keys(*block[:2]), block[2:]
            for parts in attention.compute(self._calls[hop], queries, here):
                for total, (spans, part) in zip((dq, dk, dv), parts, strict=True):
                    for span, place in in_turn(spans):
                        tokens_at(total, span).add_(tokens_at(part, place))
            block = in_range("hop", self._pass_on, rings, block, hop)
        dk, dv = block[2:]
        if keys.dk is not None and keys.dv is not None:
            return dq.to(q.dtype), keys.dk.add_(dk), keys.dv.add_(dv), ()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), ()

    def __str__(self) -> str:
        hops = (f"  hop {hop}: {len(self._calls[hop])} kernel calls" for hop in range(self.size))
        return "\n".join((f"rank {self.rank}, forward and backward:", *hops))

    def _owner(self, hop: int) -> int:
        """Return the owner of the block that this rank holds at a hop."""
        return (self.rank - hop) % self.size

    @functools.cached_property
    def _calls(self) -> list[Sequence[GatheredCall]]:
        """The kernel calls of each hop: this rank's queries with the block that it holds."""
        problem, found = self.problem, list[Sequence[GatheredCall]]()
        tiling = Tiling(problem.mask, problem.layout, problem.kv_layout)
        for hop in range(self.size):
            runs = tiling.kv_layout.runs(self._owner(hop))
            found.append(kernel_calls(tiling.tiles(self.rank, runs, [run.span for run in runs])))
        return found

    def _pass_on(self, rings: Rings, block: Sequence[Tensor], hop: int) -> list[Tensor]:
        """Send a block to the next rank. Return the previous rank's: each tensor (B, S, G, D)."""
        if self.size == 1:
            return list(block)
        layout = self.problem.kv_layout or self.problem.layout
        tokens = layout.length(self._owner(hop + 1))
        received = [x.new_empty(len(x), tokens, *x.shape[2:]) for x in block]
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        rings.inner.exchange([(x, after) for x in block], [(x, before) for x in received]).wait()
        return received
