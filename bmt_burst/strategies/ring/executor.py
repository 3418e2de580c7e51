"""What travels round the ring: blocks on their tour past the other ranks, and the gradients of visitors going home.

Nothing is computed here but sums of what arrives; `routes` says which tokens go where, a transport moves bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .merge import Gradients, Span, add_each, length, tokens_at
from .packing import Packing
from .plan import Pass, Plan
from .rings import Rings
from .routes import Group, Incoming, Outgoing
from .schedule import Edge
from .transport import Arrival, Delivery, Parcel, Ticket


class Tour:
    """The way of this rank's block `home` round the ring, in each of `passes`, and the others' visits meanwhile.

    What a pass needs first is on its way before the last group of the pass before is computed, and what the first one
    does when the context begins.
    """

    def __init__(self, plan: Plan, rings: Rings, passes: Sequence[Pass], home: tuple[Tensor, ...]):
        self.plan, self.rings, self.home = plan, rings, home
        self.to_begin = list(passes)
        self.root: tuple[Tensor, ...] = ()  # the block that opens the round that began last
        self.incoming: tuple[Tensor, ...] = ()  # the one that will open the next
        self.leap: Ticket | None = None
        self.under_way: list[Delivery] = []
        self.here: Delivery | None = None

    def __enter__(self) -> Tour:
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
            self.leap = _leap(self.rings, step, [tokens_at(x, opening.onward) for x in root], self.incoming)
        if groups:
            self._fetch(heads, groups[0], root)

    def _fetch(self, heads: Pass, group: Group, root: tuple[Tensor, ...]) -> None:
        """Starts to bring in the tokens of the group, and to send out what others look at of the root."""
        sends = [parcel for leg in group.sends for parcel in _parcels(heads.packing, leg, root, leg.span)]
        sources = [(piece.step.inner.recv_from, piece.at) for piece in group.pieces]
        delivery = _deliver(self.rings, "visit", heads.packing, group.tokens, sends, sources, root[0].device)
        self.under_way.append(delivery)


class Homecoming:
    """Brings the gradients of the blocks of a pass home and adds them up in `own`.

    Per group: `take` each call's gradients, then `depart`. They arrive while the next group is computed, a host's share
    while the next round is. `finish` completes the sums.
    """

    def __init__(self, plan: Plan, rings: Rings, heads: Pass, own: Sequence[Gradients]):
        self.plan, self.rings, self.own, self.packing = plan, rings, own, heads.return_packing
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
                add_each(self._share(group), at, grads)
        self.taken = []
        if last.outer_return:
            self._settle_inner()  # the host's share is complete before it leaves
            self._settle_outer()
            dtype = self.plan.kernel.partial_dtype(self.own[0].dtype)  # links between hosts are slow
            share = [x.result(dtype) for x in self._share(group)]
            del self.shares[group.root]
            shapes = [(x.shape[0], length(group.lent), *x.shape[2:]) for x in self.own]
            incoming = tuple(torch.empty(shape, dtype=dtype, device=self.own[0].device) for shape in shapes)
            ticket = _leap(self.rings, last.outer_return, share, incoming)
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

    def __enter__(self) -> Homecoming:
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
        delivery = _deliver(self.rings, "return", self.packing, group.home_tokens, sends, sources, device)
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
            add_each(self.own, self.outer.span, self.outer.grads)
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
            add_each(self.sums, entry.span, [tokens_at(x, entry.at) for x in self.grads])


@dataclass(frozen=True)
class _OuterReturn:
    """Another host's share of the gradients of this rank's tokens `span`, under way."""

    ticket: Ticket
    span: Span
    grads: tuple[Tensor, ...]


def _leap(rings: Rings, edge: Edge, sends: Sequence[Tensor], recvs: Sequence[Tensor]) -> Ticket:
    """Starts an exchange between hosts, of tensors that may have no tokens, and then do not travel."""
    there = [(x.contiguous(), edge.send_to) for x in sends if x.numel()]
    return rings.outer.exchange(there, [(x, edge.recv_from) for x in recvs if x.numel()])


def _deliver(
    rings: Rings,
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
    return rings.inner.deliver(lane, packing.nbytes(tokens), sends, arrivals, device)


def _parcels(packing: Packing, leg: Outgoing, tensors: Sequence[Tensor], span: Span) -> Iterator[Parcel]:
    """The messages of tokens `span` of `tensors` (B, ...) on a leg."""
    landing = leg.at, leg.at + length(span)
    for index, batch, offset, _ in packing.messages(leg.total, landing):
        yield Parcel(tensors[index][batch, slice(*span)].contiguous(), leg.peer, offset)
