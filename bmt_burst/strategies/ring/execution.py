"""The execution of a program: it performs a rank's events with tensors, and does not decide their
order.

`routes` says which tokens are sent where. This file sends and receives them; forward.py and
backward.py compute with them.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ...merging.merge import Sum
from ...merging.parts import tokens_at
from ...ranks.rings import Rings
from ...sequence.gathered_calls import GatheredCall
from ...sequence.span import Span, length, shifted
from ...transport import Delivery, Put, Ticket
from ...transport.packing import Packing
from ..compute import ALL, Keys, Queries, Tensors
from .events import Event
from .program import Pass, Program
from .routes import Round, Stage


class Execution(ABC):
    """One run of a program, with a method `_EVENT` for each event. This class moves blocks and
    results; subclasses compute them.

    The lists hold exchanges and deliveries that are under way. Blocks are `crossing` between hosts,
    `fetched` until they land, then `landed`. Results are `leaving` the host or `returning`.

    sums       the sums of this rank's results, by pass
    sent       which of them are those of the side that is sent
    root_sums  the sums of a root's results, by pass and round
    computed   partial results of the sent side of a stage, for each of these sums

    A forward that sends keys has one sum, and returns nothing.
    """

    sent = ALL

    def __init__(self, program: Program, rings: Rings, queries: Queries, keys: Keys):
        self.program, self.rings, self.device = program, rings, queries.q.device
        self.queries, self.keys = queries, keys
        self.roots: dict[tuple[int, int], Tensors] = {}  # by pass and round
        self.crossing: list[tuple[Ticket, Tensors]] = []
        self.fetched: list[Delivery] = []
        self.landed: list[Delivery] = []
        self.leaving: list[tuple[Ticket, Tensors]] = []
        self.returning: list[Delivery] = []
        self.sums: dict[int, list[Any]] = {}
        self.root_sums: dict[tuple[int, int], list[Any]] = {}
        self.computed: list[list[Any]] = []

    def run(self) -> None:
        """Perform the events in order. If one fails, leave the transport ready for the next
        call.
        """
        try:
            for event in self.program.events:
                getattr(self, f"_{event.do}")(event)
        finally:
            self._release_all()

    def _release_all(self) -> None:
        """Release what a failed run left, so that the next call finds the transport ready."""
        for delivery in self.landed:
            delivery.release()
        # These are still written to and read. If a rank is lost, gloo's wait raises here again, and
        # then the group is closed.
        for delivery in (*self.fetched, *self.returning):
            delivery.wait()
            delivery.release()
        for ticket, _ in (*self.crossing, *self.leaving):
            ticket.wait()

    def _pack(self, event: Event) -> None:
        self.roots[event.number, 0] = self._departing_part(event, self._round(event).held)

    def _cross(self, event: Event) -> None:
        round_, packing = self._round(event), self._pass(event).packing
        there = self._departing_part(event, round_.lent)
        source = round_.root // self.rings.inner.size
        self.crossing.append(
            self._exchange(there, round_.lent_to, packing, round_.landing.tokens, source)
        )

    def _arrive(self, event: Event) -> None:
        ticket, self.roots[event.number, event.round] = self.crossing.pop()
        ticket.wait()

    def _fetch(self, event: Event) -> None:
        stage, packing = self._stage(event), self._pass(event).packing
        root, puts = self.roots[event.number, event.round], list[Put]()
        for peer, span, at, total in stage.sends:
            puts += packing.puts(root, span, peer, at, total)
        self.fetched.append(self._deliver("visit", packing, stage.tokens, puts, stage.sources))

    def _land(self, event: Event) -> None:
        # Two stages may be fetched at once. They land in the order in which they were fetched.
        self.landed.append(self.fetched.pop(0))
        self.landed[-1].wait()
        if event.stage + 1 == len(self._round(event).stages):
            # The wait was for what this rank sent, too: nothing reads the root any more.
            del self.roots[event.number, event.round]

    def _free(self, event: Event) -> None:
        self.landed.pop().release()

    def _return(self, event: Event) -> None:
        stage, packing = self._stage(event), self._pass(event).return_packing
        puts: list[Put] = []
        for out in stage.returns:
            # each batch row is a message of its own, so only rows need be contiguous
            found = self._sum_computed(out.span, packing)
            found = [x if x[0].is_contiguous() else x.contiguous() for x in found]
            puts += packing.puts(found, (0, length(out.span)), out.peer, out.at, out.total)
        self.computed = []
        self.returning.append(
            self._deliver("return", packing, stage.returned_tokens, puts, stage.return_sources)
        )

    def _collect(self, event: Event) -> None:
        sums = self._add_returned(event)
        # The sums have views of the delivery's memory. Once it is released, other ranks write the
        # results of the next stage there. So the sums must read it now.
        if self.returning[-1].recycled:
            for total in sums:
                total.fold()
        self.returning.pop().release()

    def _end(self, event: Event) -> None:
        if event.stage >= 0:
            self._add_returned(event)
        self._complete(self.sums.pop(event.number))
        if event.stage >= 0:
            self.returning.pop().release()

    def _leave(self, event: Event) -> None:
        round_, packing = self._round(event), self._pass(event).return_packing
        share = self._share(self._sent_sums(event)) if round_.landing.tokens else ()
        self.root_sums.pop((event.number, event.round), None)
        owner, tokens = round_.root // self.rings.inner.size, sum(map(length, round_.lent))
        self.leaving.append(self._exchange(share, owner, packing, tokens, round_.lent_to))

    def _receive(self, event: Event) -> None:
        ticket, results = self.leaving.pop()
        ticket.wait()
        if results:
            parts = self._parts_of(self._round(event).lent, results)
            add_parts(self.sums[event.number][self.sent], parts)

    def _compute(self, event: Event) -> None:
        calls, tensors = self.program.calls[event.round, event.stage], self._received(event)
        if event.stage >= 0:
            self.computed = [[] for _ in self.sums[event.number][self.sent]]
        if calls:
            self._compute_calls(event, calls, *self._sides(event, tensors))

    @abstractmethod
    def _compute_calls(
        self, event: Event, calls: Sequence[GatheredCall], queries: Any, keys: Keys
    ) -> None:
        """Compute the calls of a stage or a root with its queries and keys."""

    @abstractmethod
    def _complete(self, sums: list[Any]) -> None:
        """Write the results of a pass. All of its parts were added."""

    @abstractmethod
    def _sum_computed(self, span: Span, packing: Packing) -> Sequence[Tensor]:
        """Return the sums of `computed` for some tokens of a stage, as they are sent."""

    @abstractmethod
    def _share(self, sums: list[Any]) -> Tensors:
        """Return the sums of a root as they are sent, contiguous."""

    @abstractmethod
    def _parts_of(self, spans: Sequence[Span], results: Sequence[Tensor]) -> Sequence[Any]:
        """Return the parts, one for each sum, that were sent as such results of tokens."""

    def _add_returned(self, event: Event) -> Sequence[Sum]:
        """Wait for the results of a stage and add them to the root's sums. Return the sums."""
        stage, packing = self._stage(event), self._pass(event).return_packing
        self.returning[-1].wait()
        sums = self._sent_sums(event)
        # `sends` count from the first token that is held, and the sums of the own block from the
        # first of its shard.
        first = 0 if event.round else self._round(event).held[0][0]
        views = packing.views(self.returning[-1].memory, stage.returned_tokens)
        for out, (_, at) in zip(stage.sends, stage.return_sources, strict=True):
            found = [tokens_at(view, at) for view in views]
            add_parts(sums, self._parts_of([shifted(out.span, first)], found))
        return sums

    def _add_computed(self, event: Event, parts: Sequence[Any]) -> None:
        """Add parts of the sent side to the sums of a root. Keep those of a stage."""
        if event.stage < 0:
            add_parts(self._sent_sums(event), parts)
            return
        for kept, part in zip(self.computed, parts, strict=True):
            kept.append(part)

    def _sent_sums(self, event: Event) -> list[Any]:
        """Return the sums of the sent side: of the own tokens, or in later rounds this host's share
        of a root's.
        """
        own, key = self.sums[event.number][self.sent], (event.number, event.round)
        if event.round and key not in self.root_sums:
            tokens = self._round(event).landing.tokens
            self.root_sums[key] = [total.like(tokens) for total in own]
        return self.root_sums[key] if event.round else own

    def _sides(self, event: Event, tensors: Sequence[Tensor]) -> tuple[Any, Keys]:
        """Return the queries and keys of a stage's calls: the received side, and the own one."""
        received, pass_ = self.program.payload.arrive(tensors), self._pass(event)
        if isinstance(received, Keys):
            return self.queries.part(ALL, pass_.q), received
        return received, self.keys.part(ALL, pass_.kv)

    def _pass(self, event: Event) -> Pass:
        return self.program.passes[event.number]

    def _round(self, event: Event) -> Round:
        return self.program.rounds[event.round]

    def _stage(self, event: Event) -> Stage:
        return self._round(event).stages[event.stage]

    def _departing_part(self, event: Event, spans: Sequence[Span]) -> Tensors:
        """Return the tensors of some own tokens to send, contiguous."""
        pass_, payload = self._pass(event), self.program.payload
        if not any(map(length, spans)):
            return ()
        if payload.sends_queries:
            return payload.depart(self.queries.part(ALL, pass_.q).gather(spans))
        return payload.depart(self.keys.part(ALL, pass_.kv).gather(spans))

    def _received(self, event: Event) -> Sequence[Tensor]:
        """Return the tensors of a stage, which are valid until they are freed, or of a root.

        There are none of a root that this host does not need.
        """
        key, stages = (event.number, event.round), self._round(event).stages
        if event.stage < 0:
            return self.roots[key] if stages else self.roots.pop(key)
        tokens = stages[event.stage].tokens
        return self._pass(event).packing.views(self.landed[-1].memory, tokens)

    def _exchange(
        self, there: Tensors, to: int, packing: Packing, tokens: int, source: int
    ) -> tuple[Ticket, Tensors]:
        """Start to send tensors to a host, and to receive those of `tokens` tokens from another."""
        here = packing.empty(tokens, self.device) if tokens else ()
        sends, recvs = [(x, to) for x in there], [(x, source) for x in here]
        return self.rings.outer.exchange(sends, recvs), here

    def _deliver(
        self,
        lane: str,
        packing: Packing,
        tokens: int,
        puts: Sequence[Put],
        sources: Iterable[tuple[int, Span]],
    ) -> Delivery:
        """Start a delivery. `tokens` tokens land here: a span from each place of `sources`."""
        inner = self.rings.inner
        # A rank waits for no message from itself: it copies those tokens when it sends.
        others = [(peer, at) for peer, at in sources if peer != inner.rank]
        arrivals = [x for peer, at in others for x in packing.arrivals(peer, at, tokens)]
        return inner.deliver(lane, packing.nbytes(tokens), puts, arrivals, self.device)


def add_parts(sums: Sequence[Sum], parts: Sequence[Any]) -> None:
    """Add a part to each of `sums`."""
    for total, part in zip(sums, parts, strict=True):
        total.add(*part)
