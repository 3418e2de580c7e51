"""The backward of a program: it adds up gradients, and returns those of tokens that were sent.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...merging.merge import Gradients, sum_parts
from ...merging.parts import Part, is_whole, tokens_at
from ...ranks.rings import Rings
from ...sequence.span import Span, length, shifted
from ...transport import Delivery, Put, Ticket
from ..compute import ALL, Keys, QueryGradients, compute_gradients
from .events import Event
from .execution import Execution
from .payload import KeysValues, QueryPayload
from .program import Program

# Partial gradients may hold this many times group_bytes before they are added up (compare
# forward.py). Memory is short in the backward, and its kernels take longer.
_GRADIENTS_WAITING = 1.25


class Backward(Execution):
    """The backward. It adds up the gradients of the side that stays. Gradients of the side that is
    sent are returned, and their owner adds them up.

    own_parts     partial dq, dk and dv of the own block
    grads         dq, dk and dv, from the event `own` on
    sums          the sums of dq, dk and dv, by pass
    root_sums     the sums of a root's gradients, by pass and round
    computed      partial gradients of the sent side of a stage
    returning     the delivery of gradients that is under way
    leaving_host  the exchange of gradients between hosts that is under way
    """

    def __init__(
        self,
        program: Program,
        payload: KeysValues | QueryPayload,
        rings: Rings,
        queries: QueryGradients,
        keys: Keys,
        inputs: tuple[Tensor, ...],
        kept: tuple[Tensor, ...],
    ):
        problem, device = program.problem, queries.q.device
        if problem.scoring.prefers_delta and problem.takes_delta:
            queries = queries.with_delta()  # then calls need not gather out
        super().__init__(program, rings, queries if payload.sends_queries else keys, device)
        self.payload, self.queries, self.keys = payload, queries, keys
        self.attention = problem.scoring.backward(problem, queries, inputs, kept)
        self.inputs = queries.q, keys.k, keys.v
        self.own_parts: tuple[list[Part], ...] = ([], [], [])
        self.grads: list[Tensor] = []
        self.sums: dict[int, list[Gradients]] = {}
        self.root_sums: dict[tuple[int, int], list[Gradients]] = {}
        self.computed: list[list[Part]] = []
        self.returning: list[Delivery] = []
        self.leaving_host: list[tuple[Ticket, tuple[Tensor, ...]]] = []

    def result(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Run. Return dq, dk and dv in the inputs' dtype, and this rank's shares of the gradients
        of the scoring's inputs.
        """
        self.run()
        dq, dk, dv = self.grads
        return dq, dk, dv, self.attention.gradients

    def _perform(self, event: Event) -> None:
        match event.do:
            case "return":
                self._return(event)
            case "collect":
                self._collect(event)
            case "leave":
                self._leave(event)
            case "receive":
                self._receive(event)
            case _:
                super()._perform(event)

    def _release_all(self) -> None:
        super()._release_all()
        for delivery in self.returning:
            delivery.wait()
            delivery.release()
        for ticket, _ in self.leaving_host:
            ticket.wait()

    def _own(self) -> None:
        for rows, columns, grads in compute_gradients(
            self.attention, self.program.own, self.queries, self.keys
        ):
            for parts, spans, grad in zip(
                self.own_parts, (rows, columns, columns), grads, strict=True
            ):
                parts.append((spans, grad))
        for parts, x in zip(self.own_parts, self.inputs, strict=True):
            whole = is_whole(parts, x.shape[1])
            self.grads.append(
                parts[0][1].to(x.dtype).contiguous() if whole else torch.empty_like(x)
            )
        if not self.program.passes:
            for total in self._sum_from_own(ALL, ALL):
                total.result()

    def _begin(self, event: Event) -> None:
        pass_ = self._pass(event)
        self.sums[event.number] = self._sum_from_own(pass_.q, pass_.kv)

    def _sum_from_own(self, q_heads: slice, kv_heads: slice) -> list[Gradients]:
        """Begin the sums of some heads with the own block's share."""
        sums = []
        for own, grad, heads in zip(
            self.own_parts, self.grads, (q_heads, kv_heads, kv_heads), strict=True
        ):
            if heads != ALL:
                grad = grad[:, :, heads]
                own = [(spans, part[:, :, heads]) for spans, part in own]
            # Without partial results of the own block, a single dq may be the result itself. Not so
            # dk and dv: their parts lie in memory that is received into.
            is_free = self.program.has_one_stage and grad is self.grads[0]
            into = None if is_free else grad
            sums.append(Gradients(grad.shape, grad.dtype, grad.device, self._limit(), into, own))
        return sums

    def _limit(self) -> int:
        return int(_GRADIENTS_WAITING * self.program.problem.group_bytes)

    def _open(self, event: Event) -> None:
        if tensors := self._root_tensors(event):
            for sent, spans in self._differentiate(event, (event.round, -1), tensors):
                _add_gradients(self._sums_of_root(event), spans, sent)

    def _compute(self, event: Event) -> None:
        self.computed = [[] for _ in self._sent_sums(event.number)]
        tensors = self._landed_tensors(event)
        for sent, spans in self._differentiate(event, (event.round, event.stage), tensors):
            for parts, grad in zip(self.computed, sent, strict=True):
                parts.append((spans, grad))

    def _differentiate(
        self, event: Event, key: tuple[int, int], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[Sequence[Tensor], Sequence[Span]]]:
        """Add gradients of the side that stays to its sums. Yield those of the sent side with
        its spans.
        """
        program, pass_, payload = self.program, self._pass(event), self.payload
        if isinstance(payload, QueryPayload):
            queries = payload.arrive(tensors, program.problem.takes_delta)
            keys = self.keys.part(ALL, pass_.kv)
        else:
            queries, keys = self.queries.part(ALL, pass_.q), payload.arrive(tensors)
        attention = self.attention.of_heads(pass_.q)
        for rows, columns, (dq, dk, dv) in compute_gradients(
            attention, program.calls[key], queries, keys
        ):
            of_queries, of_keys = ((dq,), rows), ((dk, dv), columns)
            sent, staying = (
                (of_queries, of_keys) if payload.sends_queries else (of_keys, of_queries)
            )
            _add_gradients(self._staying_sums(event.number), staying[1], staying[0])
            yield sent

    def _return(self, event: Event) -> None:
        stage, packing = self._stage(event), self._pass(event).return_packing
        puts: list[Put] = []
        for out in stage.returns:
            grads = [
                sum_parts(parts, out.span, packing.batch, *row, self.device)
                for parts, row in zip(self.computed, packing.entries, strict=True)
            ]
            grads = [x if x[0].is_contiguous() else x.contiguous() for x in grads]
            puts += packing.puts(grads, (0, length(out.span)), out.peer, out.at, out.total)
        self.computed = []
        self.returning.append(
            self._deliver("return", packing, stage.gradient_tokens, puts, stage.gradient_sources)
        )

    def _collect(self, event: Event) -> None:
        sums = self._add_returned(event)
        # The sums have views of the delivery's memory. Once it is released, other ranks write the
        # gradients of the next stage there. So the sums must read it now.
        if self.returning[-1].recycled:
            for total in sums:
                total.fold()
        self.returning.pop().release()

    def _end(self, event: Event) -> None:
        if event.stage >= 0:
            self._add_returned(event)
        sums = self.sums.pop(event.number)
        grads = [total.result() for total in sums]
        if self.program.has_one_stage:
            self.grads = grads
        if event.stage >= 0:
            self.returning.pop().release()

    def _add_returned(self, event: Event) -> list[Gradients]:
        """Wait for the gradients of a stage and add them to the root's sums. Return the sums."""
        stage, round_ = self._stage(event), self._round(event)
        self.returning[-1].wait()
        sums = self._sums_of_root(event) if event.round else self._sent_sums(event.number)
        first = 0 if event.round else round_.held[0][0]
        packing = self._pass(event).return_packing
        views = packing.views(self.returning[-1].memory, stage.gradient_tokens)
        for entry in stage.incoming_gradients:
            for total, grad in zip(sums, views, strict=True):
                total.add([shifted(entry.span, first)], tokens_at(grad, entry.at))
        return sums

    def _leave(self, event: Event) -> None:
        round_, dtype = self._round(event), self.program.problem.sizes.partial
        share = (
            [total.result(dtype) for total in self._sums_of_root(event)]
            if round_.held_tokens
            else []
        )
        self.root_sums.pop((event.number, event.round), None)
        packing = self._pass(event).return_packing
        here = packing.empty(round_.lent_tokens, self.device) if round_.lent_tokens else ()
        owner = round_.root // self.rings.inner.size
        self.leaving_host.append((self._exchange(share, owner, here, round_.lent_to), here))

    def _receive(self, event: Event) -> None:
        ticket, grads = self.leaving_host.pop()
        ticket.wait()
        if grads:
            _add_gradients(self._sent_sums(event.number), self._round(event).lent, grads)

    def _sums_of_root(self, event: Event) -> list[Gradients]:
        """Return the sums of this host's share of a root's gradients."""
        key, tokens = (event.number, event.round), self._round(event).held_tokens
        if key not in self.root_sums:
            own = self._sent_sums(event.number)
            shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in own]
            pairs = zip(shapes, own, strict=True)
            self.root_sums[key] = [
                Gradients(shape, x.dtype, x.device, self._limit()) for shape, x in pairs
            ]
        return self.root_sums[key]

    def _sent_sums(self, number: int) -> list[Gradients]:
        return self.sums[number][:1] if self.payload.sends_queries else self.sums[number][1:]

    def _staying_sums(self, number: int) -> list[Gradients]:
        return self.sums[number][1:] if self.payload.sends_queries else self.sums[number][:1]


def _add_gradients(
    sums: Sequence[Gradients], spans: Sequence[Span], grads: Sequence[Tensor]
) -> None:
    """Add to each of `sums` its gradient (B, T, ...) of the tokens of rising spans."""
    for total, grad in zip(sums, grads, strict=True):
        total.add(spans, grad)
