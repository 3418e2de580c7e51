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
import math
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
from .. import Plan, Problem, Saved, Strategy
from ..compute import ALL, Keys, QueryGradients
from ..ring import RingPlan
from .exchange import Field, Returns, Visits
from .heads import BIASED, Heads, cut_heads
from .tokens import HostLayout, HostTokens

_MOST_RUNS = 1 << 12  # more runs of positions in the tokens of a host make planning slow


class Ulysses(Strategy):
    """Heads are shared by all ranks."""

    name = "ulysses"

    def refuses(self, problem: Problem) -> str | None:
        if problem.outer > 1:
            sizes = f"{problem.outer} x {problem.inner}"
            return f"expected a single group, got a double_group of {sizes}"
        return None

    def plan(self, problem: Problem, rank: int) -> Plan:
        return UlyssesPlan(problem, rank)


class USP(Ulysses):
    """Heads are shared by the ranks of a host. Hosts form rings."""

    name = "usp"

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
        most, pairs = -(-sizes.heads // inner), sizes.batch * problem.mask.area // problem.outer
        rows = sizes.batch * max(map(self.hosts.length, range(problem.outer)))
        work = most * pairs * sizes.head_size // (BIASED if problem.scores else 1)
        cuts = cut_heads(most, ratio, rows, work)
        self.pieces = [heads.cut(cuts, ratio) for heads in self.heads]
        rings: dict[tuple[int, int], RingPlan] = {}
        self.rings = [
            [self._head_ring(at, kv_at, rings) for at, kv_at in heads.split(ratio)]
            for heads in self.pieces[self.place]
        ]
        in_pieces = sum(length(piece.kv) for pieces in self.pieces for piece in pieces)
        self.shares_kv = in_pieces > sizes.kv_heads
        self.sends_delta = problem.takes_delta
        q, kv = (
            Field(False, sizes.head_size, sizes.dtype),
            Field(True, sizes.head_size, sizes.dtype),
        )
        lse = Field(False, 0, accumulator_dtype(sizes.dtype))
        facts = sizes.batch, self.tokens, self.pieces
        self.inputs = Visits(self.place, (q, kv, kv), *facts)
        self.results = Returns(self.place, (q, lse), *facts)
        softmax = (lse, lse) if self.sends_delta else (lse, q)
        self.backward_inputs = Visits(self.place, (q, kv, kv, q, *softmax), *facts)
        self.backward_results = Returns(self.place, (q, kv, kv), *facts)

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        visit, back = self.inputs.nbytes, self.results.nbytes
        if with_backward:
            visit = max(visit, self.backward_inputs.nbytes)
            back = max(back, self.backward_results.nbytes)
        rings.reserve({"visit": visit, "return": back}, device)
        for each in self._all_rings():
            each.ring.reserve(_between_hosts(rings), device, with_backward)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        row_lses: list[Tensor] = []

        def attend(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            q, k, v = tensors
            parts: list[tuple[Tensor, ...]] = []
            for at, kv_at, ring in self.rings[piece]:
                inputs = q[:, :, at], k[:, :, kv_at], v[:, :, kv_at]
                own = self._own_heads(table, piece, at)
                out, lse, row_lse = ring.forward(_between_hosts(rings), *inputs, own)
                parts.append((out, lse))
                if row_lse is not None:
                    row_lses.append(row_lse.flatten())
            return parts

        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)
        self._run(rings, self.inputs, (q, k, v), attend, self.results, (out, lse))
        flat = None if table is None else torch.cat([table.new_empty(0), *row_lses])
        return out, lse, flat

    def backward(
        self, rings: Rings, dout: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse, table, row_lse = saved
        row_lses = self._row_lses(row_lse, len(q))
        dtable = None if table is None else torch.zeros_like(table)

        def differentiate(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            q, k, v, dout, lse, delta_or_out = tensors
            queries = (
                QueryGradients(q, dout, lse, delta=delta_or_out)
                if self.sends_delta
                else QueryGradients(q, dout, lse, delta_or_out)
            )
            parts: list[tuple[Tensor, ...]] = []
            for at, kv_at, ring in self.rings[piece]:
                sides = queries.part(ALL, at), Keys(k[:, :, kv_at], v[:, :, kv_at])
                own, share_here = (self._own_heads(x, piece, at) for x in (table, dtable))
                *grads, share = ring.differentiate(
                    _between_hosts(rings), *sides, own, next(row_lses)
                )
                parts.append(tuple(grads))
                if share_here is not None and share is not None:
                    share_here.copy_(share)
            return parts

        delta = QueryGradients(q, dout, lse, out).get_delta() if self.sends_delta else None
        inputs = (q, k, v, dout, lse, out if delta is None else delta)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (
            torch.zeros(x.shape, dtype=accumulator_dtype(x.dtype), device=x.device)
            if self.shares_kv
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
            for x in (k, v)
        )
        self._run(
            rings, self.backward_inputs, inputs, differentiate, self.backward_results, (dq, dk, dv)
        )
        return dq, dk.to(k.dtype), dv.to(v.dtype), dtable

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
        ring, device = rings.inner, inputs[0].device
        there = [visits.start(ring, 0, inputs, device)]
        back: list[Delivery] = []
        try:
            for piece in range(visits.count):
                visit = there.pop(0)
                visit.wait()
                try:
                    # after the wait, so that the inputs of one piece at a time are packed in memory
                    if piece + 1 < visits.count:
                        there.append(visits.start(ring, piece + 1, inputs, device))
                    parts = compute(piece, visits.received(piece, visit))
                finally:
                    visit.release()
                if back:
                    self._unload(returns, piece - 1, back.pop(), results)
                back.append(returns.start(ring, piece, parts, device))
            self._unload(returns, visits.count - 1, back.pop(), results)
        finally:
            for delivery in (*there, *back):
                delivery.wait()
                delivery.release()

    def _unload(
        self, returns: Returns, piece: int, delivery: Delivery, results: Sequence[Tensor]
    ) -> None:
        """Copy the results of a piece to their heads, or add them up where ranks share kv heads."""
        delivery.wait()
        for heads, tensors in returns.received(piece, delivery):
            for field, x, result in zip(returns.fields, tensors, results, strict=True):
                into = field.by_token(result)[:, :, slice(*field.heads(heads))]
                if field.kv and self.shares_kv:
                    into.add_(x)
                else:
                    into.copy_(x)
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

    def _own_heads(self, table: Tensor | None, piece: int, at: slice) -> Tensor | None:
        """Return a view of the table (R, H) of a bias: some heads of a piece."""
        if table is None:
            return None
        return table[:, slice(*self.pieces[self.place][piece].q)][:, at]

    def _row_lses(self, flat: Tensor | None, batch: int) -> Iterator[Tensor | None]:
        """Return the row_lse of each ring's forward, in turn."""
        if flat is None:
            return itertools.repeat(None)
        shapes = [
            (len(ring.problem.rows), batch, ring.problem.sizes.heads, self.tokens.total)
            for _, _, ring in self._all_rings()
        ]
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return iter([x.view(shape) for x, shape in zip(parts, shapes, strict=True)])


def _between_hosts(rings: Rings) -> Rings:
    """Return the ring of the ranks at this rank's place of all hosts."""
    return Rings(rings.outer, ALONE)
