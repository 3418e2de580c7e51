"""The ring: forward and backward of attention over a sequence that is cut over ranks.

    forward             queries stay, (k, v) travel, partial outputs merge at home
    backward, "kv"      queries stay, (k, v) travel, their gradients come back
    backward, "q"       keys stay, (q, dout, lse, delta) travel, dq comes back (BurstAttention, arXiv 2403.09347)

Everything here composes: the schedule says who moves where, the layout what is visible, `routes` which tokens go where,
a kernel computes a tile, `merge` adds up, a transport moves bytes. Nothing here writes to the caller's tensors.

Blocks arrive in groups, as many at once as `Plan.group_bytes` allows: the tokens of a group that this rank looks at lie
one after the other, and what looks at them alike is one kernel call. While a group is computed the next one is on its
way, and so are the gradients of the one before. One block a group needs the least memory; all blocks in one group is
attention over gathered keys and values. Where a single block is more than that, heads are computed a part at a time,
down to one kv head and its query heads, each with a pass round the ring.

Letters: B batch, S tokens of a rank, T tokens of a group, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .compiled import fused_on_gpus
from .layout import Tile
from .merge import Gradients, Outputs, Span, accumulator_dtype, length, query_rows
from .packing import Packing
from .plan import Plan
from .routes import Group, Incoming, Outgoing, Piece, Routes
from .schedule import Edge
from .transport import Arrival, Delivery, Parcel, Ticket

Result = TypeVar("Result")

# Partial results are read once more each time they are folded, and stay in memory until they are: so many groups' bytes
# of them wait. In the backward memory is short and kernels take longer.
_OUTPUTS_WAITING = 4
_GRADIENTS_WAITING = 1.25


@dataclass(frozen=True)
class Queries:
    """The query side of a backward: q, dout, out (B, S, H, D), lse, delta (B, H, S); out or delta is None."""

    q: Tensor
    dout: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None = None


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's q over the whole sequence: out (B, S, H, D) in q's dtype, lse (B, H, S) fp32 / fp64."""
    passes = plan.passes("kv", q, k)
    if len(passes) == 1:
        return _forward_pass(plan, q, k, v)
    batch, tokens, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, tokens, dtype=accumulator_dtype(q.dtype), device=q.device)
    for at, kv_at in passes:
        _forward_pass(plan, q[:, :, at], k[:, :, kv_at], v[:, :, kv_at], (out[:, :, at], lse[:, at]))
    return out, lse


def _forward_pass(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`forward` of some heads, written to `into` if that is given."""
    total = Outputs(q, _OUTPUTS_WAITING * plan.group_bytes)
    packing = plan.packing("kv", q, k)
    with closing(_visits(plan, plan.routes("kv", packing, returning=False), packing, (k, v))) as visits:
        for group, (k_group, v_group) in visits:
            for rows, columns, causal in _calls_by_query(group.pieces):
                k_call, v_call = _rows(k_group, columns), _rows(v_group, columns)
                out, lse = plan.kernel.forward(_rows(q, rows), k_call, v_call, causal=causal, **plan.kernel_options)
                total.add(rows, out, lse)
    return total.result(into)


def backward(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens, in the inputs' dtype."""
    passes = plan.passes(plan.backward, q, k)
    if len(passes) == 1:
        return _finish(_backward_pass(plan, k, v, Queries(q, dout, out, lse)))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    under_way = []
    try:
        for at, kv_at in passes:
            home = Queries(q[:, :, at], dout[:, :, at], out[:, :, at], lse[:, at])
            into = dq[:, :, at], dk[:, :, kv_at], dv[:, :, kv_at]
            under_way.append(_backward_pass(plan, k[:, :, kv_at], v[:, :, kv_at], home, into))
            next(under_way[-1])
            if len(under_way) > 1:  # the last gradients of the pass before came home meanwhile
                _finish(under_way.pop(0))
            next(under_way[-1])
        _finish(under_way.pop())
    finally:
        for work in under_way:
            work.close()
    return dq, dk, dv


def _backward_pass(
    plan: Plan, k: Tensor, v: Tensor, home: Queries, into: tuple[Tensor | None, ...] = (None, None, None)
) -> Generator[None, None, tuple[Tensor, ...]]:
    """`backward` of some heads, written to `into` if that is given.

    Yields once this rank's own block is computed, and once all is, with the last gradients still on their way home.
    """
    q = home.q
    waiting = int(_GRADIENTS_WAITING * plan.group_bytes)
    dq, dk, dv = (Gradients(x.shape, x.dtype, x.device, waiting) for x in (q, k, v))
    packing = plan.packing(plan.backward, q, k)
    routes = plan.routes(plan.backward, packing, returning=True)
    travels = plan.backward
    visits = _visits(plan, routes, packing, (k, v)) if travels == "kv" else _query_visits(plan, routes, packing, home)
    own = (dk, dv) if travels == "kv" else (dq,)
    # Left in this order also if a kernel fails: what is on its way home began before the last visits.
    with closing(visits), _Homecoming(plan, own, plan.return_packing(q, k)) as homecoming:
        for group, visitors in visits:
            for tile in _calls_by_block(routes, group.pieces):
                if travels == "kv":
                    dq_call, dk_call, dv_call = _tile_backward(plan, tile, home, *visitors)
                    dq.add(tile.q, dq_call)
                    homecoming.take(tile.kv, (dk_call, dv_call))
                else:
                    dq_call, dk_call, dv_call = _tile_backward(plan, tile, visitors, k, v)
                    dk.add(tile.kv, dk_call)
                    dv.add(tile.kv, dv_call)
                    homecoming.take(tile.q, (dq_call,))
            homecoming.depart(group)
            if group.steps[0].block == plan.rank:
                yield
        yield
        sums = dict(zip((dq, dk, dv), into, strict=True))
        results = {total: total.result(into=x) for total, x in sums.items() if total not in own}
        homecoming.finish()  # the last gradients came home meanwhile
        results |= {total: total.result(into=x) for total, x in sums.items() if total in own}
        return tuple(results[total] for total in sums)


def _finish(work: Generator[None, None, Result]) -> Result:
    """Runs to the end and returns the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def reserve(plan: Plan, q: Tensor, k: Tensor, with_backward: bool) -> None:
    """Lets the transport prepare for what will land on ranks of this host; all ranks call it alike."""
    host, visit, home = plan.rings.outer.rank, 0, 0
    for travels, returning in (("kv", False), *([(plan.backward, True)] if with_backward else [])):
        for at, kv_at in plan.passes(travels, q, k):
            q_part, k_part = q[:, :, at], k[:, :, kv_at]
            packing = plan.packing(travels, q_part, k_part)
            tokens, home_tokens = plan.routes(travels, packing, returning).landing_tokens(host)
            visit = max(visit, packing.nbytes(tokens))
            if returning:
                home = max(home, plan.return_packing(q_part, k_part).nbytes(home_tokens))
    plan.rings.inner.reserve({"visit": visit, "return": home}, q.device)


@fused_on_gpus
def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """A tensor o' (B, S, H, D) in dout's dtype with rowsum(o' * dout) = delta (B, H, S), for kernels that need out.

    o' = dout * delta / |dout|^2, with the row's largest entry factored out so that nothing over- or underflows. Where
    dout is 0 delta is too, and so is o'.
    """
    wide = dout.to(delta.dtype)
    largest = wide.abs().amax(-1, keepdim=True)
    unit = wide / largest.masked_fill(largest == 0, 1.0)
    divisor = unit.square().sum(-1, keepdim=True) * largest
    factor = delta.transpose(1, 2).unsqueeze(-1) / divisor.masked_fill(divisor == 0, 1.0)
    return (unit * factor).to(dout.dtype)


def _visits(
    plan: Plan, routes: Routes, packing: Packing, home: tuple[Tensor, ...]
) -> Iterator[tuple[Group, tuple[Tensor, ...]]]:
    """The groups of all rounds and their tokens, tensors (B, T, ...) that are good until the next group.

    This rank's own block, `home`, is first.
    """
    root = tuple(x.contiguous() for x in home)
    rounds = routes.rounds(plan.rank)
    for number, (opening, *groups) in enumerate(rounds):
        leap, incoming = None, ()
        if step := opening.steps[0].outer:
            tokens = rounds[number + 1][0].tokens
            incoming = tuple(x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in root)
            leap = _leap(plan, step, [_rows(x, opening.onward) for x in root], incoming)
        under_way = [_fetch(plan, groups[0], packing, root)] if groups else []
        here = None
        try:
            yield opening, root
            for group, following in itertools.zip_longest(groups, groups[1:]):
                if following:
                    under_way.append(_fetch(plan, following, packing, root))
                here = under_way.pop(0)
                here.wait()
                yield group, packing.views(here.memory, group.tokens)
                here.release()
                here = None
        finally:  # if the caller gives up, the next call must find all as it should be
            if here:
                here.release()
            for delivery in under_way:
                delivery.wait()
                delivery.release()
            if leap:
                leap.wait()
        root = incoming


def _leap(plan: Plan, edge: Edge, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Ticket:
    """Starts an exchange between hosts, of tensors that may have no tokens, and then do not travel."""
    there = [(x.contiguous(), edge.send_to) for x in sends if x.numel()]
    return plan.rings.outer.exchange(there, [(x, edge.recv_from) for x in recvs if x.numel()])


def _fetch(plan: Plan, group: Group, packing: Packing, root: tuple[Tensor, ...]) -> Delivery:
    """Starts to bring in the tokens of the group, and to send out what others look at of the root."""
    sends = [parcel for leg in group.sends for parcel in _parcels(packing, leg, root, leg.span)]
    sources = [(piece.step.inner.recv_from, piece.at) for piece in group.pieces]
    return _deliver(plan, "visit", packing, group.tokens, sends, sources, root[0].device)


def _deliver(
    plan: Plan,
    lane: str,
    packing: Packing,
    tokens: int,
    sends: Sequence[Parcel],
    sources: Sequence[tuple[int, Span]],
    device: torch.device,
) -> Delivery:
    """Starts a delivery in which `tokens` land here, parts of them from each of `sources`: (rank of the ring, part)."""
    arrivals = [
        Arrival(peer, offset, nbytes) for peer, at in sources for _, _, offset, nbytes in packing.messages(tokens, at)
    ]
    return plan.rings.inner.deliver(lane, packing.nbytes(tokens), sends, arrivals, device)


def _parcels(packing: Packing, leg: Outgoing, tensors: Sequence[Tensor], span: Span) -> Iterator[Parcel]:
    """The messages of tokens `span` of `tensors` (B, ...) on a leg."""
    landing = leg.at, leg.at + length(span)
    for index, batch, offset, _ in packing.messages(leg.total, landing):
        yield Parcel(tensors[index][batch, slice(*span)].contiguous(), leg.peer, offset)


def _query_visits(plan: Plan, routes: Routes, packing: Packing, home: Queries) -> Iterator[tuple[Group, Queries]]:
    """The query sides of all ranks in groups. What has a value per head and token travels as (B, S, heads)."""
    heads = home.q.shape[2]
    if plan.send_out:
        tensors = home.q, home.dout, home.lse.transpose(1, 2), home.out
    else:
        tensors = home.q, home.dout, query_rows(home.out, home.dout, home.lse)
    with closing(_visits(plan, routes, packing, tensors)) as visits:
        for group, (q, dout, rows, *out) in visits:
            lse = rows[..., :heads].transpose(1, 2)
            if group.steps[0].block == plan.rank:
                yield group, home
            elif plan.send_out:
                yield group, Queries(q, dout, *out, lse)
            else:
                delta = rows[..., heads:].transpose(1, 2)
                if plan.kernel.takes_delta:
                    yield group, Queries(q, dout, None, lse, delta)
                else:
                    yield group, Queries(q, dout, surrogate_out(dout, delta), lse)


def _calls_by_query(pieces: Sequence[Piece]) -> Iterator[tuple[Span, Span, bool]]:
    """Kernel calls (home queries, group's tokens, causal) in which every query stands in at most one call.

    Pieces lie in the order of how many queries see them, so what a range of queries sees lies together.
    """
    yield from ((p.tile.q, p.at, True) for p in pieces if p.tile.causal)
    whole = [p for p in pieces if not p.tile.causal]
    cuts = sorted({cut for p in whole for cut in p.tile.q})
    for rows in itertools.pairwise(cuts):
        seen = [p.at for p in whole if p.tile.q[0] <= rows[0] and rows[1] <= p.tile.q[1]]
        if seen:
            yield rows, (seen[0][0], seen[-1][1]), False


def _calls_by_block(routes: Routes, pieces: Sequence[Piece]) -> Iterator[Tile]:
    """Kernel calls in which every token of the group stands in one call: tiles of home tokens and group's tokens."""
    calls: list[tuple[Span, Span, bool]] = []  # home tokens, group's tokens, causal
    for piece in pieces:
        home, causal = routes.home_side(piece.tile), piece.tile.causal
        if calls and not causal and calls[-1][0] == home and calls[-1][1][1] == piece.at[0]:
            calls[-1] = home, (calls[-1][1][0], piece.at[1]), False
        else:
            calls.append((home, piece.at, causal))
    for home, at, causal in calls:
        yield Tile(at, home, causal) if routes.travels == "q" else Tile(home, at, causal)


def _tile_backward(plan: Plan, tile: Tile, side: Queries, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the tokens of one tile."""
    dout, q, out = (None if x is None else _rows(x, tile.q) for x in (side.dout, side.q, side.out))
    lse, delta = (None if x is None else x[:, :, slice(*tile.q)] for x in (side.lse, side.delta))
    k, v = _rows(k, tile.kv), _rows(v, tile.kv)
    return plan.kernel.backward(dout, q, k, v, out, lse, delta, causal=tile.causal, **plan.kernel_options)


class _Homecoming:
    """Brings the gradients of travelling blocks home and adds them up in `own`; `packing` says how they travel.

    Per group: `take` each call's gradients, then `depart`. They arrive while the next group is computed, a host's share
    while the next round is. After `finish` the sums are whole; they may be read as long as the context lasts.
    """

    def __init__(self, plan: Plan, own: tuple[Gradients, ...], packing: Packing):
        self.plan, self.own, self.packing = plan, own, packing
        self.shares = {plan.rank: own}  # by the block that opened a round: this host's share of its gradients
        self.taken: list[tuple[Span, tuple[Tensor, ...]]] = []
        self.inner: _Return | None = None
        self.landed: Delivery | None = None  # the last one, added to the sums but not folded
        self.outer: _OuterReturn | None = None

    def take(self, at: Span, grads: tuple[Tensor, ...]) -> None:
        """Gradients of the group's tokens at[0]..at[1] - 1."""
        self.taken.append((at, grads))

    def depart(self, group: Group) -> None:
        self._settle_inner()
        last = group.steps[-1]
        if last.inner_return:
            self.inner = self._send_home(group)
        else:
            for at, grads in self.taken:
                _add(self._share(group), at, grads)
        self.taken = []
        if last.outer_return:
            self._settle_inner()  # the host's share is complete before it leaves
            self._settle_outer()
            dtype = self.plan.kernel.partial_dtype(self.own[0].dtype)  # links between hosts are slow
            share = [x.result(dtype) for x in self._share(group)]
            del self.shares[group.root]
            shapes = [(x.shape[0], length(group.lent), *x.shape[2:]) for x in self.own]
            incoming = tuple(torch.empty(shape, dtype=dtype, device=self.own[0].device) for shape in shapes)
            ticket = _leap(self.plan, last.outer_return, share, incoming)
            self.outer = _OuterReturn(ticket, group.lent, incoming)

    def finish(self) -> None:
        """Waits for what is still on its way."""
        self._settle_outer()
        if self.inner:
            self.inner.arrive()
            self.landed, self.inner = self.inner.delivery, None

    def __enter__(self) -> _Homecoming:
        return self

    def __exit__(self, *_exception) -> None:
        if self.outer:
            self.outer.ticket.wait()
        if self.inner:
            self.inner.delivery.wait()
            self.landed = self.inner.delivery
        if self.landed:
            self.landed.release()

    def _send_home(self, group: Group) -> _Return:
        """Sends the group's gradients to the ranks that opened the round with its blocks, takes in the root's."""
        sends = []
        for leg in group.returns:
            [(start, grads)] = [(at[0], g) for at, g in self.taken if at[0] <= leg.span[0] and leg.span[1] <= at[1]]
            sends += _parcels(self.packing, leg, grads, (leg.span[0] - start, leg.span[1] - start))
        sources, device = [(entry.peer, entry.at) for entry in group.homecoming], self.own[0].device
        delivery = _deliver(self.plan, "return", self.packing, group.home_tokens, sends, sources, device)
        grads = self.packing.views(delivery.memory, group.home_tokens)
        return _Return(delivery, group.homecoming, grads, self._share(group))

    def _settle_inner(self) -> None:
        if self.inner:
            self.inner.arrive()
            if self.inner.delivery.recycled:
                for total in self.inner.sums:
                    total.fold()
            self.inner.delivery.release()
            self.inner = None

    def _settle_outer(self) -> None:
        if self.outer:
            self.outer.ticket.wait()
            _add(self.own, self.outer.span, self.outer.grads)
            self.outer = None

    def _share(self, group: Group) -> tuple[Gradients, ...]:
        """This host's share of the gradients of what it has of the group's root block."""
        if group.root not in self.shares:
            self.shares[group.root] = tuple(
                Gradients((x.shape[0], length(group.held), *x.shape[2:]), x.dtype, x.device, x.limit) for x in self.own
            )
        return self.shares[group.root]


@dataclass(frozen=True)
class _Return:
    """Gradients on their way home within the host, and the sums that they will be added to."""

    delivery: Delivery
    entries: tuple[Incoming, ...]
    grads: tuple[Tensor, ...]
    sums: tuple[Gradients, ...]

    def arrive(self) -> None:
        self.delivery.wait()
        for entry in self.entries:
            _add(self.sums, entry.span, [_rows(x, entry.at) for x in self.grads])


@dataclass(frozen=True)
class _OuterReturn:
    """Another host's share of the gradients of this rank's tokens `span`, under way."""

    ticket: Ticket
    span: Span
    grads: tuple[Tensor, ...]


def _add(sums: Sequence[Gradients], span: Span, parts: Sequence[Tensor]) -> None:
    for total, part in zip(sums, parts, strict=True):
        total.add(span, part)


def _rows(x: Tensor, span: Span) -> Tensor:
    """Tokens span[0]..span[1] - 1 of (B, S, ...), a view."""
    return x[:, slice(*span)]
