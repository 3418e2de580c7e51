"""The execution of a program: it performs a rank's events with tensors, and does not decide their
order.

`routes` says which tokens are sent where. This file sends and receives them; forward.py and
backward.py compute with them.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ...ranks.rings import Rings
from ...sequence.span import Span, length
from ...transport import Delivery, Put, Ticket
from ...transport.packing import Packing
from ..compute import ALL, Keys, Queries, Tensors
from .events import Event
from .program import Pass, Program
from .routes import Round, Stage


class Execution:
    """One run of a program, with a method `_EVENT` for each event. This class moves blocks;
    subclasses compute with them.

    The lists hold exchanges and deliveries that are under way. Blocks are `crossing` between hosts,
    `fetched` until they land, then `landed`. Gradients are `leaving` the host or `returning`.
    """

    def __init__(self, program: Program, rings: Rings, queries: Queries, keys: Keys):
        self.program, self.rings, self.device = program, rings, queries.q.device
        self.queries, self.keys = queries, keys
        self.roots: dict[tuple[int, int], Tensors] = {}  # by pass and round
        self.crossing: list[tuple[Ticket, Tensors]] = []
        self.fetched: list[Delivery] = []
        self.landed: list[Delivery] = []
        self.leaving: list[tuple[Ticket, Tensors]] = []
        self.returning: list[Delivery] = []

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
        """Start a delivery of which `tokens` land here: those of each (place, span)."""
        inner = self.rings.inner
        # A rank waits for no message from itself: it copies those tokens when it sends.
        others = [(peer, at) for peer, at in sources if peer != inner.rank]
        arrivals = [x for peer, at in others for x in packing.arrivals(peer, at, tokens)]
        return inner.deliver(lane, packing.nbytes(tokens), puts, arrivals, self.device)
