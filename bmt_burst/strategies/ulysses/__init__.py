"""Ulysses: each rank computes some heads of the tokens of all ranks (DeepSpeed-Ulysses, arXiv
2309.14509).

    forward     each rank sends q, k, v to the ranks of their heads; these return out and lse to the
                ranks of their tokens
    backward    each rank sends q, k, v, dout, lse, and delta or out; these return dq, dk, dv

    heads       which rank computes which heads, and how many at a time
    tokens      the tokens of a host, and where they lie in memory
    exchange    the messages between ranks

Of H query heads, rank r of n computes H r // n to H (r + 1) // n - 1. With fewer heads than ranks,
some ranks have none. A kv head is sent to every rank that has one of its query heads, and the ranks
of its tokens add up the gradients from all of them. `print(plan)` shows who gets which heads.

A rank computes its heads in pieces. While it computes one piece, it receives the next one and
returns the one before.

"usp" is Ulysses around the ring (USP, arXiv 2405.07719). The ranks of each host share the heads in
this way, so each has some heads of its host's tokens. The attention of these to the tokens of other
hosts is a ring of the ranks at the same place of all hosts. With one host that ring is one rank,
which computes the whole mask: this is "ulysses".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...base.dtypes import accumulator_dtype
from ...merging.merge import empty_lse, stack_lse_delta
from ...ranks.rings import Rings
from ...sequence.span import length
from ...transport import ALONE, Delivery
from .. import Plan, Problem, Sizes, Strategy
from ..compute import ALL, Keys, Queries, QueryGradients, Tensors
from ..ring import RingPlan
from .exchange import WIDE, Field, Returns, Visits
from .heads import Heads, cut_heads
from .tokens import HostLayout, HostTokens

_MOST_RUNS = 1 << 12  # more runs of positions in the tokens of a host make planning slow


class Ulysses(Strategy):
    """Heads are shared by all ranks."""

    name = "ulysses"
    takes_hosts = False

    def plan(self, problem: Problem, rank: int) -> Plan:
        """Return the part of `rank`. Hosts of one rank share no heads, so they are just a ring."""
        return RingPlan(problem, rank) if problem.inner == 1 else UlyssesPlan(problem, rank)


class USP(Ulysses):
    """Heads are shared by the ranks of a host. Hosts form rings."""

    name = "usp"
    takes_hosts = True

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
    """The ring that computes some query heads of a piece.

    q, kv  these heads and their kv heads, counted from the first ones of the piece
    heads  these heads, counted from the first one of all
    """

    q: slice
    kv: slice
    heads: slice
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
        self.hosts = HostLayout(problem.layout, inner)
        self.tokens = HostTokens(self.hosts, self.host)
        self.heads = [
            Heads.of_rank(place, inner, sizes.heads, sizes.kv_heads) for place in range(inner)
        ]
        ratio = sizes.heads // sizes.kv_heads
        cuts = self._cut_heads(ratio)
        self.pieces = [*zip(*(heads.cut(cuts, ratio) for heads in self.heads), strict=True)]
        self.rings = self._plan_rings(ratio)
        in_pieces = sum(length(heads.kv) for piece in self.pieces for heads in piece)
        self.shares_kv = in_pieces > sizes.kv_heads
        self._plan_exchanges()

    def _plan_exchanges(self) -> None:
        sizes, inner = self.problem.sizes, self.problem.inner
        sums = accumulator_dtype(sizes.dtype)
        is_wide = sizes.head_size * sizes.dtype.itemsize % WIDE.itemsize == 0
        q = Field(False, sizes.head_size, sizes.dtype, WIDE if is_wide else sizes.dtype)
        kv = kv_grad = replace(q, kv=True)
        if self.shares_kv:
            kv_grad = replace(kv, unit=sizes.dtype, is_summed=True)
        lse = Field(False, 1, sums, sums)
        # lse and delta of a head, and zeros, since all units divide 16 bytes
        rows = replace(q, head_size=WIDE.itemsize // sums.itemsize, dtype=sums)
        queries = (q, q, rows, q) if self.problem.send_out else (q, q, rows)
        # if ranks have equally many kv heads, the heads of all are equally far apart
        together = 1 if sizes.kv_heads % inner else inner
        facts = sizes.batch, self.tokens, self.pieces, together
        self.inputs = Visits(self.place, (q, kv, kv), *facts)
        self.results = Returns(self.place, (q, lse), *facts)
        self.backward_inputs = Visits(self.place, (kv, kv, *queries), *facts)
        self.backward_results = Returns(self.place, (q, kv_grad, kv_grad), *facts)

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        visits, returns = self.inputs.nbytes, self.results.nbytes
        if with_backward:
            visits = visits + self.backward_inputs.nbytes
            returns = returns + self.backward_results.nbytes
        rings.reserve({"visit": max(visits), "return": max(returns)}, device)
        for each in itertools.chain(*self.rings):
            each.ring.reserve(_between_hosts(rings), device, with_backward)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, inputs: Tensors = ()
    ) -> tuple[Tensor, Tensor, Tensors]:
        between, select = _between_hosts(rings), self.problem.scoring.select_heads
        kept: list[Tensor] = []  # by the rings of all pieces, equally many each

        def attend(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            parts: list[tuple[Tensor, ...]] = []
            queries, keys = Queries(tensors[0]), Keys(*tensors[1:])
            for at, kv_at, heads, ring in self.rings[piece]:
                q, kv = queries.part(ALL, at).q, keys.part(ALL, kv_at)
                out, lse, found = ring.forward(between, q, kv.k, kv.v, select(inputs, heads))
                parts.append((out, _by_token(lse)))
                kept.extend(found)
            return parts

        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)
        results = out, _by_token(lse)
        self._run(rings, self.inputs, (q, k, v), attend, self.results, results)
        return out, lse, tuple(kept)

    def backward(
        self, rings: Rings, queries: QueryGradients, keys: Keys, inputs: Tensors, kept: Tensors
    ) -> tuple[Tensor, Tensor, Tensor, Tensors]:
        q, k, v = queries.q, keys.k, keys.v
        between, select = _between_hosts(rings), self.problem.scoring.select_heads
        gradients, remaining = tuple(map(torch.zeros_like, inputs)), iter(kept)
        kept_by_ring = len(kept) // max(sum(map(len, self.rings)), 1)

        def differentiate(piece: int, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
            k, v, q, dout, rows, *out = tensors
            lse, delta = rows[..., 0].transpose(1, 2), rows[..., 1].transpose(1, 2)
            queries = QueryGradients(q, dout, lse, *(out or (None, delta)))
            keys, parts = Keys(k, v), list[tuple[Tensor, ...]]()
            for at, kv_at, heads, ring in self.rings[piece]:
                sides = queries.part(ALL, at), keys.part(ALL, kv_at)
                own = tuple(itertools.islice(remaining, kept_by_ring))
                *grads, shares = ring.backward(between, *sides, select(inputs, heads), own)
                parts.append(tuple(grads))
                for into, share in zip(select(gradients, heads), shares, strict=True):
                    into.copy_(share)
            return parts

        sent = k, v, q, queries.dout, *self._make_rows(queries)
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dtype = accumulator_dtype(k.dtype) if self.shares_kv else k.dtype
        dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        if self.shares_kv:
            dk.zero_(), dv.zero_()
        visits, returns = self.backward_inputs, self.backward_results
        self._run(rings, visits, sent, differentiate, returns, (dq, dk, dv))
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
        before are returned. All ranks have the same order of events, and each waits only for what
        every rank enqueues earlier. So streams do not deadlock (docs/design.md).
        """
        ring, device, last = rings.inner, results[0].device, len(self.pieces) - 1
        rows, into = visits.to_rows(inputs), returns.to_rows(results)
        there, back = [visits.start(ring, 0, rows)], list[Delivery]()
        try:
            for piece, head_rings in enumerate(self.rings):
                if piece < last:
                    there.append(visits.start(ring, piece + 1, rows))
                visit = there.pop(0)
                try:
                    visit.wait()
                    parts = compute(piece, visits.receive(piece, visit)) if head_rings else []
                finally:
                    visit.release()
                if back:
                    returns.receive(piece - 1, back.pop(), into)
                back.append(returns.start(ring, piece, parts, device))
            returns.receive(last, back.pop(), into)
        finally:
            for delivery in (*there, *back):
                delivery.wait()
                delivery.release()

    def __str__(self) -> str:
        """Show which rank gets which heads."""
        first, size = self.host * self.problem.inner, self.problem.layout.size
        counts = ", ".join(str(length(heads[self.place].q)) for heads in self.pieces)
        rings = [each.ring for each in itertools.chain(*self.rings)]
        lines = [
            f"rank {first + self.place} of {size}: {self.tokens.total} tokens, "
            f"{len(rings)} head rings; heads at a time: {counts}"
        ]
        for rank, (q, kv) in enumerate(self.heads, first):
            some = f"query heads {q[0]} to {q[1] - 1}, kv heads {kv[0]} to {kv[1] - 1}"
            lines.append(f"  rank {rank} computes {some if length(q) else 'no heads'}")
        if self.hosts.size > 1:
            for number, ring in enumerate(rings):
                lines += [f"between hosts, of head ring {number}:", *str(ring).splitlines()]
        return "\n".join(lines)

    def _cut_heads(self, ratio: int) -> tuple[int, ...]:
        problem, sizes = self.problem, self.problem.sizes
        most, pairs = -(-sizes.heads // problem.inner), problem.mask.area // problem.outer
        rows = sizes.batch * max(map(self.hosts.length, range(problem.outer)))
        work = most * sizes.batch * pairs * sizes.head_size // problem.scoring.host_work
        return cut_heads(most, ratio, rows, work)

    def _plan_rings(self, ratio: int) -> list[list[HeadRing]]:
        """Return the rings of each piece. Those of as many heads share a plan."""
        problem, plans, found = self.problem, dict[Sizes, RingPlan](), list[list[HeadRing]]()
        for piece in self.pieces:
            heads, rings = piece[self.place], list[HeadRing]()
            for at, kv_at in heads.split(ratio):
                q, kv = range(*heads.q)[at], range(*heads.kv)[kv_at]
                sizes = replace(problem.sizes, heads=len(q), kv_heads=len(kv))
                ring = replace(
                    problem, layout=self.hosts, inner=problem.outer, outer=1, sizes=sizes
                )
                plan = plans.setdefault(sizes, RingPlan(ring, self.host))
                rings.append(HeadRing(at, kv_at, slice(q.start, q.stop), plan))
            found.append(rings)
        return found

    def _make_rows(self, queries: QueryGradients) -> tuple[Tensor, ...]:
        """Return lse and delta of each head, (B, S, H, 2) with zeros up to 16 bytes a head. For
        a problem that sends out, return lse and out.
        """
        lse, dout, out = queries.lse, queries.dout, queries.out
        assert out is not None, "a call has out"
        with_delta = not self.problem.send_out
        rows = stack_lse_delta(out, dout, lse) if with_delta else _by_token(lse)
        rows = pad(rows, (0, WIDE.itemsize // rows.itemsize - rows.shape[-1]))
        return (rows,) if with_delta else (rows, out)


def _between_hosts(rings: Rings) -> Rings:
    """Return the ring of the ranks at this rank's place of all hosts."""
    return Rings(rings.outer, ALONE)


def _by_token(lse: Tensor) -> Tensor:
    """Return a view (B, S, H, 1) of lse (B, H, S)."""
    return lse.transpose(1, 2).unsqueeze(-1)
