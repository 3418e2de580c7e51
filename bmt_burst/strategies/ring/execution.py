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
from typing import assert_never

import torch
from torch import Tensor

from ...ranks.rings import Rings
from ...sequence.span import Span, length
from ...transport import Delivery, Put, Ticket
from ...transport.packing import Packing
from ..compute import ALL, Side
from .events import Event
from .program import Pass, Program
from .routes import Round, Stage


class Execution(ABC):
    """One run of a program. This class moves blocks; subclasses compute with them.

    leaving  the side of the own block that others need

    The lists hold exchanges and deliveries that are under way: `crossing` between hosts, `fetched`
    until they land, then `landed`.
    """

    def __init__(self, program: Program, rings: Rings, leaving: Side, device: torch.device):
        self.program, self.rings, self.leaving, self.device = program, rings, leaving, device
        self.roots: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by pass and round
        self.crossing: list[tuple[Ticket, tuple[Tensor, ...]]] = []
        self.fetched: list[Delivery] = []
        self.landed: list[Delivery] = []

    def run(self) -> None:
        """Perform the events in order. If one fails, leave the transport ready for the next
        call.
        """
        try:
            for event in self.program.events:
                self._perform(event)
        finally:
            self._release_all()

    def _perform(self, event: Event) -> None:
        match event.do:
            case "pack":
                self.roots[event.number, 0] = self._leaving_part(event, self.program.rounds[0].held)
            case "cross":
                self._cross(event)
            case "fetch":
                self._fetch(event)
            case "own":
                self._own()
            case "begin":
                self._begin(event)
            case "open":
                self._open(event)
            case "land":
                self._land(event)
            case "compute":
                self._compute(event)
            case "free":
                self.landed.pop().release()
            case "arrive":
                self._arrive(event)
            case "end":
                self._end(event)
            case "return" | "collect" | "leave" | "receive":
                raise AssertionError(f"a forward returns no gradients, got {event}")
            case _:
                assert_never(event.do)

    @abstractmethod
    def _own(self) -> None: ...

    @abstractmethod
    def _begin(self, event: Event) -> None: ...

    @abstractmethod
    def _open(self, event: Event) -> None: ...

    @abstractmethod
    def _compute(self, event: Event) -> None: ...

    @abstractmethod
    def _end(self, event: Event) -> None: ...

    def _release_all(self) -> None:
        """Release what a failed run left, so that the next call finds the transport ready."""
        for delivery in self.landed:
            delivery.release()
        for delivery in self.fetched:
            delivery.wait()
            delivery.release()
        for ticket, _ in self.crossing:
            ticket.wait()

    def _pass(self, event: Event) -> Pass:
        return self.program.passes[event.number]

    def _round(self, event: Event) -> Round:
        return self.program.rounds[event.round]

    def _stage(self, event: Event) -> Stage:
        return self._round(event).stages[event.stage]

    def _leaving_part(self, event: Event, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """Return the tensors of some own tokens to send, contiguous."""
        pass_, payload = self._pass(event), self.program.payload
        if not any(map(length, spans)):
            return ()
        side = self.leaving.part(ALL, pass_.q if payload.sends_queries else pass_.kv)
        return payload.depart(side.gather(spans))

    def _cross(self, event: Event) -> None:
        round_ = self._round(event)
        there = self._leaving_part(event, round_.lent)
        here = (
            self._pass(event).packing.empty(round_.held_tokens, self.device)
            if round_.held_tokens
            else ()
        )
        ticket = self._exchange(there, round_.lent_to, here, round_.root // self.rings.inner.size)
        self.crossing.append((ticket, here))

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

    def _landed_tensors(self, event: Event) -> Sequence[Tensor]:
        """Return the tensors that landed. They are valid until they are freed."""
        return self._pass(event).packing.views(self.landed[-1].memory, self._stage(event).tokens)

    def _root_tensors(self, event: Event) -> tuple[Tensor, ...]:
        """Return the tensors of a round's root, or none if this rank needs nothing of it."""
        key = event.number, event.round
        return self.roots[key] if self._round(event).stages else self.roots.pop(key)

    def _exchange(
        self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int
    ) -> Ticket:
        """Start an exchange between hosts."""
        return self.rings.outer.exchange([(x, to) for x in sends], [(x, source) for x in recvs])

    def _deliver(
        self,
        lane: str,
        packing: Packing,
        tokens: int,
        puts: Sequence[Put],
        sources: Iterable[tuple[int, Span]],
    ) -> Delivery:
        """Start a delivery of which `tokens` land here: those of each (rank, place)."""
        arrivals = [x for peer, at in sources for x in packing.arrivals(peer, at, tokens)]
        return self.rings.inner.deliver(lane, packing.nbytes(tokens), puts, arrivals, self.device)
