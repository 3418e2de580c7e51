"""Ulysses: each rank computes some heads of the tokens of all ranks (DeepSpeed-Ulysses, arXiv
2309.14509).

    forward     each rank sends q, k, v to the ranks of their heads; these return out and lse to the
                ranks of their tokens
    backward    each rank sends q, k, v, dout, lse and delta; these return dq, dk, dv

    heads       which rank computes which heads, and how many at a time
    exchange    the messages between ranks, and where tokens lie in memory

Of H query heads, rank r of n computes H r // n to H (r + 1) // n - 1. With fewer heads than ranks,
some ranks have none. A kv head is sent to every rank that has one of its query heads, and the ranks
of its tokens add up the gradients from all of them. `print(plan)` shows who gets which heads.

"usp" is Ulysses around the ring (USP, arXiv 2405.07719). The ranks of each host share the heads in
this way, so each has some heads of its host's tokens. The attention of these to the tokens of other
hosts is a ring of the ranks at the same place of all hosts. With one host that ring is one rank,
which computes the whole mask: this is "ulysses".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...base.dtypes import WIDE, accumulator_dtype, copy_unit
from ...base.ranges import in_range
from ...merging.merge import empty_lse, stack_lse_delta
from ...merging.parts import by_token
from ...ranks.rings import Rings
from ...sequence.span import length
from ...transport import ALONE, LANES, Delivery
from .. import Plan, Problem, Sizes, Strategy
from ..compute import Keys, QueryGradients, Tensors
from ..ring import RingPlan
from .exchange import Field, HostLayout, HostTokens, Return, Visit
from .heads import cut_heads, kv_heads, plan_pieces, share_heads

_MOST_RUNS = 1 << 12  # more runs of positions in the tokens of a host make planning slow


class Ulysses(Strategy):
    """Heads are shared by all ranks."""

    name = "ulysses"
    takes_hosts = takes_kv_layout = False

    def plan(self, problem: Problem, rank: int) -> Plan:
        # hosts of one rank share no heads
        return RingPlan(problem, rank) if problem.inner == 1 else UlyssesPlan(problem, rank)


class USP(Ulysses):
    """Heads are shared by the ranks of a host. Hosts form rings."""

    name = "usp"
    takes_hosts = True

    def refuses(self, problem: Problem) -> str | None:
        layout, is_grid = problem.layout, problem.inner > 1 and problem.outer > 1
        runs = sum(len(r) for r in layout.shards[0] if r.step > 1) if is_grid else 0
        if runs > _MOST_RUNS:
            got = f"{runs} of a {layout.name} layout: choose another layout"
            return f"expected at most {_MOST_RUNS} runs of positions on a host, got {got}"
        return super().refuses(problem)


class UlyssesPlan(Plan):
    """The part of one rank: pieces of its heads, each with an exchange before and after its ring.

    heads      the query heads of each rank of the host
    pieces     those of each piece, by rank
    rings      the ring that computes the heads of this rank, by piece, or None without heads
    shares_kv  whether several pieces have query heads of one kv head
    """

    def __init__(self, problem: Problem, rank: int):
        self.problem, sizes, inner = problem, problem.sizes, problem.inner
        self.host, self.place = divmod(rank, inner)
        self.hosts = HostLayout(problem.layout, inner)
        self.tokens = HostTokens(self.hosts, self.host)
        self.heads = share_heads(sizes.heads, inner)
        self.ratio = ratio = sizes.heads // sizes.kv_heads
        self.pieces = plan_pieces(self.heads, ratio, self._cut_heads())
        self.rings = self._plan_rings()
        counts = (length(kv_heads(heads, ratio)) for heads in itertools.chain(*self.pieces))
        self.shares_kv = sum(counts) > sizes.kv_heads
        dtype, sums = sizes.dtype, accumulator_dtype(sizes.dtype)
        q = Field(1, sizes.head_size, dtype, copy_unit(dtype, sizes.head_size))
        kv = kv_grad = replace(q, ratio=ratio)
        if self.shares_kv:
            kv_grad = replace(kv, unit=dtype, is_summed=True)
        lse = Field(1, 1, sums, sums)
        # lse and delta of a head, in 16 bytes, which all units divide
        rows = replace(q, head_size=WIDE.itemsize // sums.itemsize, dtype=sums)
        # If ranks have equally many kv heads, the heads of all are equally far apart.
        groups = (
            [range(i, i + 1) for i in range(inner)] if sizes.kv_heads % inner else [range(inner)]
        )
        facts = self.tokens, self.place, sizes.batch, groups
        self.inputs = [Visit((q, kv, kv), heads, *facts) for heads in self.pieces]
        self.results = [Return((q, lse), heads, *facts) for heads in self.pieces]
        sent, returned = (kv, kv, q, q, rows), (q, kv_grad, kv_grad)
        self.backward_inputs = [Visit(sent, heads, *facts) for heads in self.pieces]
        self.backward_results = [Return(returned, heads, *facts) for heads in self.pieces]

    def lane_bytes(self, with_backward: bool) -> dict[str, int]:
        exchanges = [*self.inputs, *self.results]
        if with_backward:
            exchanges += [*self.backward_inputs, *self.backward_results]
        return {lane: max(x.nbytes for x in exchanges if x.lane == lane) for lane in LANES}

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        super().reserve(rings, device, with_backward)
        for ring in filter(None, self.rings):
            ring.reserve(Rings(rings.outer, ALONE), device, with_backward)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        between, select = Rings(rings.outer, ALONE), self.problem.scoring.select_heads
        kept: list[Tensor] = []  # by the rings of all pieces, equally many each

        def attend(ring: RingPlan, heads: slice, tensors: Sequence[Tensor]) -> Tensors:
            q, k, v = tensors
            out, lse, found = ring.forward(between, q, k, v, select(inputs, heads))
            kept.extend(found)
            return out, by_token(lse)

        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)
        results = out, by_token(lse)
        self._run(rings, self.inputs, (q, k, v), attend, self.results, results)
        return out, lse, tuple(kept)

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        q, k, v = queries.q, keys.k, keys.v
        between, select = Rings(rings.outer, ALONE), self.problem.scoring.select_heads
        gradients, remaining = tuple(map(torch.zeros_like, inputs)), iter(kept)
        kept_by_ring = len(kept) // max(len(self.rings) - self.rings.count(None), 1)

        def differentiate(ring: RingPlan, heads: slice, tensors: Sequence[Tensor]) -> Tensors:
            k, v, q, dout, rows = tensors
            lse, delta = rows[..., 0].transpose(1, 2), rows[..., 1].transpose(1, 2)
            queries = QueryGradients(q, dout, lse, delta=delta)
            own = tuple(itertools.islice(remaining, kept_by_ring))
            *grads, shares = ring.backward(between, queries, Keys(k, v), select(inputs, heads), own)
            for into, share in zip(select(gradients, heads), shares, strict=True):
                into.copy_(share)
            return tuple(grads)

        assert queries.out is not None, "a call has out"
        width = WIDE.itemsize // queries.lse.itemsize
        rows = stack_lse_delta(queries.out, queries.dout, queries.lse, width)
        sent = k, v, q, queries.dout, rows
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # Gradients of shared kv heads are added up.
        dtype = accumulator_dtype(k.dtype) if self.shares_kv else k.dtype
        make = torch.zeros if self.shares_kv else torch.empty
        dk, dv = (make(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        visits, returns = self.backward_inputs, self.backward_results
        self._run(rings, visits, sent, differentiate, returns, (dq, dk, dv))
        return dq, dk.to(k.dtype), dv.to(v.dtype), gradients

    def _run(
        self,
        rings: Rings,
        visits: Sequence[Visit],
        inputs: Sequence[Tensor],
        compute: Callable[[RingPlan, slice, Sequence[Tensor]], Tensors],
        returns: Sequence[Return],
        results: Sequence[Tensor],
    ) -> None:
        """Send inputs, compute all pieces and fill the results.

        While a piece is computed, the next one's inputs are received and the results of the one
        before are returned. Streams do not deadlock in this order (docs/design.md).
        """
        ring, device, last = rings.inner, results[0].device, len(self.pieces) - 1
        rows, into = visits[0].to_rows(inputs), returns[0].to_rows(results)
        there, back = [in_range("fetch", visits[0].start, ring, rows)], list[Delivery]()
        try:
            for piece, head_ring in enumerate(self.rings):
                if piece < last:
                    there.append(in_range("fetch", visits[piece + 1].start, ring, rows))
                visit = there.pop(0)
                try:
                    in_range("land", visit.wait)
                    visit.wait_for_sends()  # they are as large as what was received
                    heads, found = slice(*self.pieces[piece][self.place]), Tensors()
                    if head_ring:
                        landed = visits[piece].receive(visit)
                        found = in_range("compute", compute, head_ring, heads, landed)
                finally:
                    visit.release()
                if back:
                    in_range("collect", returns[piece - 1].receive, back.pop(), into)
                back.append(in_range("return", returns[piece].start, ring, found, device))
            in_range("collect", returns[last].receive, back.pop(), into)
        finally:
            for delivery in (*there, *back):
                delivery.wait()
                delivery.release()

    def __str__(self) -> str:
        first, size = self.host * self.problem.inner, self.problem.layout.size
        counts = ", ".join(str(length(heads[self.place])) for heads in self.pieces)
        rings = [*filter(None, self.rings)]
        lines = [
            f"rank {first + self.place} of {size}: {self.tokens.total} tokens, "
            f"{len(rings)} head rings; heads at a time: {counts}"
        ]
        for rank, q in enumerate(self.heads, first):
            kv = kv_heads(q, self.ratio)
            some = f"query heads {q[0]} to {q[1] - 1}, kv heads {kv[0]} to {kv[1] - 1}"
            lines.append(f"  rank {rank} computes {some if length(q) else 'no heads'}")
        if self.hosts.size > 1:
            for number, ring in enumerate(rings):
                lines += [f"between hosts, of head ring {number}:", *str(ring).splitlines()]
        return "\n".join(lines)

    def _cut_heads(self) -> tuple[int, ...]:
        problem, sizes = self.problem, self.problem.sizes
        most, pairs = -(-sizes.heads // problem.inner), problem.mask.area // problem.outer
        rows = sizes.batch * max(map(self.hosts.length, range(problem.outer)))
        work = most * sizes.batch * pairs * sizes.head_size // problem.scoring.host_work
        return cut_heads(most, self.ratio, rows, work)

    def _plan_rings(self) -> list[RingPlan | None]:
        """Return the ring of each piece. Those of as many heads share a plan."""
        problem, found = self.problem, list[RingPlan | None]()
        hosts = replace(problem, layout=self.hosts, inner=problem.outer, outer=1)
        plans: dict[Sizes, RingPlan] = {}
        for piece in self.pieces:
            heads, kv = piece[self.place], kv_heads(piece[self.place], self.ratio)
            sizes = replace(problem.sizes, heads=length(heads), kv_heads=length(kv))
            plan = plans.setdefault(sizes, RingPlan(replace(hosts, sizes=sizes), self.host))
            found.append(plan if length(heads) else None)
        return found
