"""Ulysses: each rank computes some heads of the tokens of all ranks (DeepSpeed-Ulysses, arXiv
2309.14509).

    forward     each rank sends q, k, v to the ranks of their heads; these return out and lse to the
                ranks of their tokens
    backward    each rank sends q, k, v, dout, lse, and delta or out; these return dq, dk, dv

    heads       which rank computes which heads, and how many at a time
    tokens      the tokens of a host, and where they lie in memory
    exchange    the messages between ranks

Rank r of n computes query heads H r // n to H (r + 1) // n - 1. With fewer heads than ranks, some
ranks have none. A kv head is sent to every rank that has one of its query heads, and its owner adds
up the gradients from all of them. `print(plan)` shows which rank gets which heads.

A rank computes its heads in pieces. While it computes one piece, it receives the next one and
returns the one before.

"usp" is Ulysses around the ring (USP, arXiv 2405.07719). The ranks of each host share the heads in
this way, so each has some heads of its host's tokens. The attention of these to the tokens of other
hosts is a ring of the ranks at the same place of all hosts. With one host that ring is one rank,
which computes the whole mask: this is "ulysses".

Letters: B batch, S tokens of a rank, N tokens of its host, H query heads, G kv heads, h and g those
of a rank, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...base.dtypes import accumulator_dtype
from ...merging.merge import empty_lse
from ...ranks.rings import Rings
from ...sequence.span import length
from ...transport import ALONE, Delivery
from .. import Plan, Problem, Strategy
from ..compute import ALL, Keys, Queries, QueryGradients
from ..ring import RingPlan
from .exchange import Field, Returns, Visits
from .heads import Heads, cut_heads
from .tokens import HostLayout, HostTokens

_MOST_RUNS = 1 << 12  # more runs of positions in the tokens of a host make planning slow


class Ulysses(Strategy):
    """Heads are shared by all ranks."""

    name = "ulysses"
    takes_hosts = False

    def plan(self, problem: Problem, rank: int) -> Plan:
        return UlyssesPlan(problem, rank)


class USP(Ulysses):
    """Heads are shared by the ranks of a host. Hosts form rings."""

    name = "usp"
    takes_hosts = True

    def plan(self, problem: Problem, rank: int) -> Plan:
        """Return the part of `rank`. Hosts of one rank share no heads, so they are just a ring."""
        is_ring = problem.inner == 1 < problem.outer
        return RingPlan(problem, rank) if is_ring else UlyssesPlan(problem, rank)

    def refuses(self, problem: Problem) -> str | None:
        layout, is_grid = problem.layout, problem.inner > 1 and problem.outer > 1
        runs = sum(len(r) for r in layout.shards[0] if r.step > 1) if is_grid else 0
        if runs > _MOST_RUNS:
            return (
                f"expected at most {_MOST_RUNS} runs of positions on a host, got {runs} of a "
                f"{layout.name} layout: choose another layout"
            )
        return None


class HeadRing(NamedTuple):
    """Some query heads of a piece with their kv heads, counted from its first ones, and the ring
    that computes them.
    """

    q: slice
    kv: slice
    ring: RingPlan


class UlyssesPlan(Plan):
    """The part of one rank: pieces of its heads, each with an exchange before and after its rings,
    in each direction.

    heads      the heads of each rank of the host
    pieces     the heads of each piece, by rank
    rings      the rings of each piece of this rank
    shares_kv  whether several pieces have query heads of one kv head
    """

    def __init__(self, problem: Problem, rank: int):
        self.problem, sizes, inner = problem, problem.sizes, problem.inner
        self.host, self.place = divmod(rank, inner)
        self.ranks = range(self.host * inner, (self.host + 1) * inner)
        self.hosts = HostLayout(problem.layout, inner)
        self.tokens = HostTokens(self.hosts, self.host)
        ratio = sizes.heads // sizes.kv_heads
        self.heads = [
            Heads.of_rank(place, inner, sizes.heads, sizes.kv_heads) for place in range(inner)
        ]
        cuts = self._cut_heads(ratio)
        self.pieces = [heads.cut(cuts, ratio) for heads in self.heads]
        rings: dict[tuple[int, int], RingPlan] = {}
        self.rings = [
            [self._head_ring(at, kv_at, rings) for at, kv_at in heads.split(ratio)]
            for heads in self.pieces[self.place]
        ]
        in_pieces = sum(length(piece.kv) for pieces in self.pieces for piece in pieces)
        self.shares_kv = in_pieces > sizes.kv_heads
        self.sends_delta = problem.takes_delta
        q = Field(False, sizes.head_size, sizes.dtype)
        kv, lse = replace(q, kv=True), Field(False, 0, accumulator_dtype(sizes.dtype))
        kv_grad = replace(kv, is_summed=self.shares_kv)
        facts = sizes.batch, self.tokens, self.pieces
        self.inputs = Visits(self.place, (q, kv, kv), *facts)
        self.results = Returns(self.place, (q, lse), *facts)
        sides = q, kv, kv, q, lse, lse if self.sends_delta else q
        self.backward_inputs = Visits(self.place, sides, *facts)
        self.backward_results = Returns(self.place, (q, kv_grad, kv_grad), *facts)

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        visit, back = self.inputs.nbytes, self.results.nbytes
        if with_backward:
            visit = max(visit, self.backward_inputs.nbytes)
            back = max(back, self.backward_results.nbytes)
        rings.reserve({"visit": visit, "return": back}, device)
        for each in self._all_rings():
            each.ring.reserve(_between_hosts(rings), device, with_backward)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        between = _between_hosts(rings)
        kept: list[Tensor] = []  # by the rings of all pieces, equally many each

        def attend(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            parts: list[tuple[Tensor, ...]] = []
            q, keys = Queries(tensors[0]), Keys(*tensors[1:])
            for at, kv_at, ring in self.rings[piece]:
                q_part, kv = q.part(ALL, at).q, keys.part(ALL, kv_at)
                own = self._own_heads(inputs, piece, at)
                out, lse, found = ring.forward(between, q_part, kv.k, kv.v, own)
                parts.append((out, lse))
                kept.extend(found)
            return parts

        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)
        self._run(rings, self.inputs, (q, k, v), attend, self.results, (out, lse))
        return out, lse, tuple(kept)

    def backward(
        self,
        rings: Rings,
        queries: QueryGradients,
        keys: Keys,
        inputs: tuple[Tensor, ...] = (),
        kept: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        q, dout, lse, k, v = queries.q, queries.dout, queries.lse, keys.k, keys.v
        count = len(kept) // max(len([*self._all_rings()]), 1)
        of_rings = iter([kept[i : i + count] for i in range(0, len(kept), count or 1)])
        between, gradients = _between_hosts(rings), tuple(map(torch.zeros_like, inputs))

        def differentiate(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            q, k, v, dout, lse, last = tensors
            out, delta = (None, last) if self.sends_delta else (last, None)
            queries, keys = QueryGradients(q, dout, lse, out, delta), Keys(k, v)
            parts: list[tuple[Tensor, ...]] = []
            for at, kv_at, ring in self.rings[piece]:
                sides = queries.part(ALL, at), keys.part(ALL, kv_at)
                own = self._own_heads(inputs, piece, at)
                *grads, shares = ring.backward(between, *sides, own, next(of_rings, ()))
                parts.append(tuple(grads))
                for into, share in zip(self._own_heads(gradients, piece, at), shares, strict=True):
                    into.copy_(share)
            return parts

        last = queries.get_delta() if self.sends_delta else queries.out
        assert last is not None, "a call has out"
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (
            torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device)
            if self.shares_kv
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for x in (k, v)
        )
        visits, returns = self.backward_inputs, self.backward_results
        self._run(rings, visits, (q, k, v, dout, lse, last), differentiate, returns, (dq, dk, dv))
        return dq, dk.to(k.dtype), dv.to(v.dtype), gradients

    def _run(
        self,
        rings: Rings,
        visits: Visits,
        inputs: Sequence[Tensor],
        compute: Callable[[int, Sequence[Tensor]], Sequence[tuple[Tensor, ...]]],
        returns: Returns,
        results: Sequence[Tensor],
    ) -> None:
        """Send inputs, compute all pieces and fill the results.

        While a piece is computed, the next one's inputs are received and the results of the one
        before are returned. See docs/design.md for the reason why streams do not deadlock.
        """
        ring, rows, into = rings.inner, visits.to_rows(inputs), returns.to_rows(results)
        there = [visits.start(ring, 0, rows)]
        back: list[Delivery] = []
        try:
            for piece, head_rings in enumerate(self.rings):
                if piece + 1 < len(self.rings):
                    there.append(visits.start(ring, piece + 1, rows))
                visit = there.pop(0)
                try:
                    visit.wait()
                    # copies, so that the slot is free while they are computed
                    tensors = visits.receive(piece, visit, rows) if head_rings else []
                finally:
                    visit.release()
                parts = compute(piece, tensors) if head_rings else []
                if back:
                    _unload(returns, piece - 1, back.pop(), into)
                back.append(returns.start(ring, piece, parts, into))
            _unload(returns, len(self.rings) - 1, back.pop(), into)
        finally:
            for delivery in (*there, *back):
                delivery.wait()
                delivery.release()

    def __str__(self) -> str:
        """Show which rank gets which heads."""
        layout, rank, rings = self.problem.layout, self.ranks[self.place], [*self._all_rings()]
        lines = [
            f"rank {rank} of {layout.size}: {self.tokens.total} tokens, "
            f"{len(rings)} head rings; heads at a time: "
            f"{', '.join(str(length(heads.q)) for heads in self.pieces[self.place])}"
        ]
        for rank, (q, kv) in zip(self.ranks, self.heads, strict=True):
            some = (
                f"query heads {q[0]} to {q[1] - 1}, kv heads {kv[0]} to {kv[1] - 1}"
                if length(q)
                else "no heads"
            )
            lines.append(f"  rank {rank} computes {some}")
        if self.hosts.size > 1:
            for number, each in enumerate(rings):
                lines += [f"between hosts, of head ring {number}:", *str(each.ring).splitlines()]
        return "\n".join(lines)

    def _cut_heads(self, ratio: int) -> tuple[int, ...]:
        problem, sizes = self.problem, self.problem.sizes
        most, pairs = -(-sizes.heads // problem.inner), problem.mask.area // problem.outer
        rows = sizes.batch * max(map(self.hosts.length, range(problem.outer)))
        work = most * sizes.batch * pairs * sizes.head_size // problem.scoring.host_work
        return cut_heads(most, ratio, rows, work)

    def _all_rings(self) -> Iterator[HeadRing]:
        return itertools.chain.from_iterable(self.rings)

    def _head_ring(
        self, at: slice, kv_at: slice, known: dict[tuple[int, int], RingPlan]
    ) -> HeadRing:
        """Return the ring between hosts for some heads. `known` has those for numbers of heads."""
        heads, kv_heads = at.stop - at.start, kv_at.stop - kv_at.start
        if (heads, kv_heads) not in known:
            sizes = replace(self.problem.sizes, heads=heads, kv_heads=kv_heads)
            ring = replace(
                self.problem, layout=self.hosts, inner=self.problem.outer, outer=1, sizes=sizes
            )
            known[heads, kv_heads] = RingPlan(ring, self.host)
        return HeadRing(at, kv_at, known[heads, kv_heads])

    def _own_heads(self, inputs: tuple[Tensor, ...], piece: int, at: slice) -> tuple[Tensor, ...]:
        """Return views of a scoring's inputs, or of their gradients, for some heads of a piece."""
        heads = range(self.problem.sizes.heads)[slice(*self.pieces[self.place][piece].q)][at]
        return self.problem.scoring.select_heads(inputs, slice(heads.start, heads.stop))


def _unload(returns: Returns, piece: int, delivery: Delivery, results: Sequence[Tensor]) -> None:
    delivery.wait()
    returns.receive(piece, delivery, results)
    delivery.release()


def _between_hosts(rings: Rings) -> Rings:
    """Return the ring of the ranks at this rank's place of all hosts."""
    return Rings(rings.outer, ALONE)
