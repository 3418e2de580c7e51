"""The ring: forward and backward of attention over a sequence that is cut over ranks.

    forward             queries stay, (k, v) travel, partial outputs merge at home
    backward, "kv"      queries stay, (k, v) travel, their gradients come back
    backward, "q"       keys stay, (q, dout, lse, delta) travel, dq comes back (BurstAttention, arXiv 2403.09347)

Everything here composes: the schedule says who moves where, the layout what is visible, `routes` which tokens go where,
a kernel computes a tile, `merge` adds up, a transport moves bytes. Nothing here writes to the caller's tensors.

Each rank computes its own block first. Then the others' come by, some heads at a time, each with a pass round the ring,
and in groups of as many blocks as `Plan.group_bytes` allows: the tokens of a group that this rank looks at lie one
after the other, and what looks at them alike is one kernel call. While a group is computed the next one is on its way,
and so are the gradients of the one before, also from one pass to the next. One block of one kv head a group needs the
least memory; all blocks in one group is attention over gathered keys and values.

Letters: B batch, S tokens of a rank, T tokens of a group, H query heads, G kv heads, D head size. All that travels is
(B, S, heads, ...).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .compiled import fused_on_gpus
from .layout import Tile
from .merge import Gradients, Outputs, Span, length, query_rows
from .packing import Packing
from .plan import Pass, Plan
from .routes import Group, Incoming, Outgoing, Piece, Routes
from .schedule import Edge
from .transport import Arrival, Delivery, Parcel, Ticket

Summand = TypeVar("Summand")

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

    def heads(self, at: slice) -> Queries:
        """Some of the heads, views."""
        q, dout, out = (None if x is None else x[:, :, at] for x in (self.q, self.dout, self.out))
        lse, delta = (None if x is None else x[:, at] for x in (self.lse, self.delta))
        return Queries(q, dout, out, lse, delta)


def forward(plan: Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of this rank's q over the whole sequence: out (B, S, H, D) in q's dtype, lse (B, H, S) fp32 / fp64."""
    passes = plan.passes("kv", q, k, returning=False)
    with _Tour(plan, passes, (k, v)) as tour:
        own_out, own_lse = plan.kernel.forward(q, k, v, causal=plan.causal, **plan.kernel_options)
        out, lse = _result(own_out, q), torch.empty_like(own_lse) if passes else own_lse
        for heads in passes:
            queries = q[:, :, heads.q]
            total = Outputs(out[:, :, heads.q], lse[:, heads.q], _OUTPUTS_WAITING * plan.group_bytes)
            total.add((0, q.shape[1]), own_out[:, :, heads.q], own_lse[:, heads.q])
            for group, block in tour.visits(heads):
                _attend(plan, group, queries, block, total)
                del block  # the next one may take its memory
            total.result()
    return out, lse


def backward(
    plan: Plan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's tokens, in the inputs' dtype."""
    travels, home, whole = plan.backward, Queries(q, dout, out, lse), (0, q.shape[1])
    passes = plan.passes(travels, q, k, returning=True)
    departing = (k, v) if travels == "kv" or not passes else _departing(plan, home)
    with ExitStack() as stack:
        tour = stack.enter_context(_Tour(plan, passes, departing))
        own = _tile_backward(plan, Tile(whole, whole, plan.causal), home, k, v)
        results = [_result(grad, x) for grad, x in zip(own, (q, k, v), strict=True)]
        before = None  # the homecoming of the pass before, whose last gradients are on their way
        for heads in passes:
            parts = zip(own, results, (heads.q, heads.kv, heads.kv), strict=True)
            sums = [_begun(plan, grad[:, :, at], into[:, :, at]) for grad, into, at in parts]
            staying, leaving = _split(travels, sums)
            homecoming = stack.enter_context(_Homecoming(plan, heads, leaving))
            here = home.heads(heads.q), (k[:, :, heads.kv], v[:, :, heads.kv])
            for group, block in tour.visits(heads):
                sides = (here[0], block) if travels == "kv" else (_visiting(plan, block), here[1])
                _differentiate(plan, heads.routes, group, *sides, staying, homecoming)
                del block, sides  # the next one may take its memory
                if before and (not before.outer or group.root != plan.rank):  # between hosts it takes up to a round
                    before.finish()
                    before = None
                homecoming.depart(group)
            for total in staying:
                total.result()
            before = homecoming
        if before:
            before.finish()
    dq, dk, dv = results
    return dq, dk, dv


def reserve(plan: Plan, q: Tensor, k: Tensor, with_backward: bool) -> None:
    """Lets the transport prepare for what will land on ranks of this host; all ranks call it alike."""
    host, visit, home = plan.rings.outer.rank, 0, 0
    for travels, returning in (("kv", False), *([(plan.backward, True)] if with_backward else [])):
        for heads in plan.passes(travels, q, k, returning):
            tokens, home_tokens = heads.routes.landing_tokens(host)
            visit = max(visit, heads.packing.nbytes(tokens))
            if heads.return_packing:
                home = max(home, heads.return_packing.nbytes(home_tokens))
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


class _Tour:
    """The way of this rank's block `home` round the ring, in each of `passes`, and the others' visits meanwhile.

    What a pass needs first is on its way before the last group of the pass before is computed, and what the first one
    does when the context begins.
    """

    def __init__(self, plan: Plan, passes: Sequence[Pass], home: tuple[Tensor, ...]):
        self.plan, self.home = plan, home
        self.to_begin = list(passes)
        self.root: tuple[Tensor, ...] = ()  # the block that opens the round that began last
        self.incoming: tuple[Tensor, ...] = ()  # the one that will open the next
        self.leap: Ticket | None = None
        self.under_way: list[Delivery] = []
        self.here: Delivery | None = None

    def __enter__(self) -> _Tour:
        try:
            self._begin_pass()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exception) -> None:  # if the caller gave up, the next call must find all as it should be
        if self.here:
            self.here.release()
        for delivery in self.under_way:
            delivery.wait()
            delivery.release()
        if self.leap:
            self.leap.wait()

    def visits(self, heads: Pass) -> Iterator[tuple[Group, tuple[Tensor, ...]]]:
        """The groups of all rounds of a pass, and their tokens, tensors (B, T, ...) that are good until the next group.

        Passes are to be gone through in their order, each to its end. The own block is not among the visitors.
        """
        rounds = heads.routes.rounds(self.plan.rank)
        for number, (opening, *groups) in enumerate(rounds):
            (root, self.root), is_last = (self.root, ()), number + 1 == len(rounds)
            if is_last and not groups:  # a host has one rank
                self._begin_pass()
            if number:
                yield opening, root
            for group, following in itertools.zip_longest(groups, groups[1:]):
                if following:
                    self._fetch(heads, following, root)
                else:
                    root = ()  # its memory is free once all has left
                    if is_last:
                        self._begin_pass()
                self.here = self.under_way.pop(0)
                self.here.wait()
                yield group, heads.packing.views(self.here.memory, group.tokens)
                self.here.release()
                self.here = None
            if not is_last:
                leap, self.leap = self.leap, None
                leap.wait()
                self._begin_round(heads, number + 1, self.incoming)

    def _begin_pass(self) -> None:
        if self.to_begin:
            heads = self.to_begin.pop(0)
            self._begin_round(heads, 0, tuple(x[:, :, heads.away].contiguous() for x in self.home))

    def _begin_round(self, heads: Pass, number: int, root: tuple[Tensor, ...]) -> None:
        """Starts what runs under the opening of a round: the way to the next host, and the first group's to here."""
        rounds = heads.routes.rounds(self.plan.rank)
        opening, *groups = rounds[number]
        self.root, self.incoming = root, ()
        if step := opening.steps[0].outer:
            tokens = rounds[number + 1][0].tokens
            self.incoming = tuple(x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in root)
            self.leap = _leap(self.plan, step, [_rows(x, opening.onward) for x in root], self.incoming)
        if groups:
            self._fetch(heads, groups[0], root)

    def _fetch(self, heads: Pass, group: Group, root: tuple[Tensor, ...]) -> None:
        """Starts to bring in the tokens of the group, and to send out what others look at of the root."""
        sends = [parcel for leg in group.sends for parcel in _parcels(heads.packing, leg, root, leg.span)]
        sources = [(piece.step.inner.recv_from, piece.at) for piece in group.pieces]
        delivery = _deliver(self.plan, "visit", heads.packing, group.tokens, sends, sources, root[0].device)
        self.under_way.append(delivery)


def _leap(plan: Plan, edge: Edge, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Ticket:
    """Starts an exchange between hosts, of tensors that may have no tokens, and then do not travel."""
    there = [(x.contiguous(), edge.send_to) for x in sends if x.numel()]
    return plan.rings.outer.exchange(there, [(x, edge.recv_from) for x in recvs if x.numel()])


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


def _departing(plan: Plan, home: Queries) -> tuple[Tensor, ...]:
    """What travels of the queries: q and dout (B, S, H, D), and of each row lse and delta, or else lse and out."""
    if plan.send_out:
        return home.q, home.dout, home.lse.transpose(1, 2), home.out
    return home.q, home.dout, query_rows(home.out, home.dout, home.lse)


def _visiting(plan: Plan, block: tuple[Tensor, ...]) -> Queries:
    """The queries of which `block` has arrived."""
    q, dout, rows, *out = block
    if plan.send_out:
        return Queries(q, dout, *out, rows.transpose(1, 2))
    lse, delta = (x.transpose(1, 2) for x in rows.unbind(-1))
    if plan.kernel.takes_delta:
        return Queries(q, dout, None, lse, delta)
    return Queries(q, dout, surrogate_out(dout, delta), lse)


def _result(own: Tensor, like: Tensor) -> Tensor:
    """Where a sum that begins with the own block's share ends up, in the dtype of an input: there, if it can be."""
    return own.to(like.dtype).contiguous()


def _begun(plan: Plan, own: Tensor, into: Tensor) -> Gradients:
    """The sum that begins with the own block's share, (B, S, heads, D) as is `into`, where it ends up."""
    total = Gradients(into.shape, into.dtype, into.device, int(_GRADIENTS_WAITING * plan.group_bytes), into)
    total.add((0, into.shape[1]), own)
    return total


def _attend(plan: Plan, group: Group, q: Tensor, block: tuple[Tensor, ...], total: Outputs) -> None:
    """Adds to `total` what q of the home tokens finds in a group, whose k and v are `block`."""
    for rows, columns, causal in _calls_by_query(group.pieces):
        k, v = (_rows(x, columns) for x in block)
        total.add(rows, *plan.kernel.forward(_rows(q, rows), k, v, causal=causal, **plan.kernel_options))


def _differentiate(
    plan: Plan,
    routes: Routes,
    group: Group,
    queries: Queries,
    keys: tuple[Tensor, ...],
    staying: Sequence[Gradients],
    homecoming: _Homecoming,
) -> None:
    """Adds the gradients of a group's tiles to those that stay, and hands over those that go home."""
    for tile in _calls_by_block(routes, group.pieces):
        mine, theirs = _split(routes.travels, _tile_backward(plan, tile, queries, *keys))
        _add(staying, routes.home_side(tile), mine)
        homecoming.take(routes.away_side(tile), theirs)


def _split(travels: str, of_qkv: Sequence[Summand]) -> tuple[Sequence[Summand], Sequence[Summand]]:
    """What belongs to dq, dk and dv: those that stay, and those that go home."""
    of_q, of_kv = of_qkv[:1], of_qkv[1:]
    return (of_q, of_kv) if travels == "kv" else (of_kv, of_q)


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
    """Brings the gradients of the blocks of a pass home and adds them up in `own`.

    Per group: `take` each call's gradients, then `depart`. They arrive while the next group is computed, a host's share
    while the next round is. `finish` completes the sums.
    """

    def __init__(self, plan: Plan, heads: Pass, own: Sequence[Gradients]):
        self.plan, self.own, self.packing = plan, own, heads.return_packing
        self.shares = {plan.rank: own}  # by the block that opened a round: this host's share of its gradients
        self.taken: list[tuple[Span, Sequence[Tensor]]] = []
        self.inner: _Return | None = None
        self.landed: Delivery | None = None  # the last one, added to the sums but not folded
        self.outer: _OuterReturn | None = None

    def take(self, at: Span, grads: Sequence[Tensor]) -> None:
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
        """Waits for what is still on its way, completes the sums and lets go of them."""
        self._settle_outer()
        if self.inner:
            self.inner.arrive()
            self.landed, self.inner = self.inner.delivery, None
        for total in self.own:
            total.result()
        self.own, self.shares = (), {}
        self._release()

    def __enter__(self) -> _Homecoming:
        return self

    def __exit__(self, *_exception) -> None:
        if self.outer:
            self.outer.ticket.wait()
        if self.inner:
            self.inner.delivery.wait()
            self.landed = self.inner.delivery
        self._release()

    def _release(self) -> None:
        if self.landed:
            self.landed.release()
            self.landed = None

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

    def _share(self, group: Group) -> Sequence[Gradients]:
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
    sums: Sequence[Gradients]

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
