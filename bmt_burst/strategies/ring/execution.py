"""The execution of a program: it performs a rank's events with tensors, and does not decide their
order. `Execution` moves blocks and results. `Forward` and `Backward` compute them.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ...base.ranges import in_range
from ...merging.merge import Outputs, Sum
from ...merging.parts import is_whole, tokens_at
from ...ranks.rings import Rings
from ...sequence.span import Span, length, shifted
from ...transport import Delivery, Put, Ticket
from ...transport.packing import Packing
from ..compute import ALL, Attention, AttentionGradient, Keys, Queries, Tensors
from .program import Event, Pass, Program
from .routes import Round, Stage


class Execution(ABC):
    """One run of a program, with a method `_EVENT` for each event.

    Results are out with lse, or dq, dk and dv. Each is a `summing` of partial results. `waiting`
    times group_bytes of these may wait before they are added up.

    Blocks are `crossing` between hosts, `fetched` until they land, then `landed`. Results are
    `leaving` the host or `returning`.

    likes      for each result, the input of its shape, and the earlier sum to add to, if any
    results    the memory of each result, from the event `own` on, () if it is found at the end
    own_parts  the partial results of the own block, for each result
    sums       the sums of this rank's results, by pass
    sent       which of them are those of the side that is sent, none in a forward that sends keys
    root_sums  the sums of a root's results, by pass and round
    computed   the sums of a stage's results
    """

    summing: type[Sum]
    waiting: float
    attention: Any

    def __init__(
        self,
        program: Program,
        rings: Rings,
        attention: Attention | AttentionGradient,
        queries: Queries,
        keys: Keys,
        *likes: tuple[Tensor, Tensor | None],
    ):
        self.program, self.rings, self.device = program, rings, queries.q.device
        self.attention, self.queries, self.keys, self.likes = attention, queries, keys, likes
        self.sent = slice(0, 1) if program.payload.sends_queries else slice(1, 3)
        self.limit = self.waiting * program.problem.group_bytes
        self.results: list[Tensors] = []
        self.own_parts: list[list[Any]] = []

    def run(self) -> list[Tensors]:
        """Perform the events. Return the results in the inputs' dtype, or the sums that the keys
        have. If an event fails, the transport is ready for the next call.
        """
        if not self.program.passes:  # nothing is sent
            self._own(self.program.events[0])
            return self.results
        self.roots: dict[tuple[int, int], Tensors] = {}  # by pass and round
        self.ready: dict[tuple[int, int], Any] = {}  # marks of when these can be sent
        self.crossing: list[tuple[Ticket, Tensors]] = []
        self.fetched: list[Delivery] = []
        self.landed: list[Delivery] = []
        self.leaving: list[tuple[Ticket, Tensors]] = []
        self.returning: list[Delivery] = []
        self.sums: dict[int, list[Sum]] = {}
        self.root_sums: dict[tuple[int, int], list[Sum]] = {}
        self.computed: list[Sum] = []
        try:
            for event in self.program.events:
                in_range(event, getattr(self, f"_{event.do}"), event)
        finally:
            for delivery in self.landed:
                delivery.release()
            # These are still written to and read. If a rank is lost, gloo's wait raises here again,
            # and then the group is closed.
            for delivery in (*self.fetched, *self.returning):
                delivery.wait()
                delivery.release()
            for ticket, _ in (*self.crossing, *self.leaving):
                ticket.wait()
        return self.results

    @abstractmethod
    def _reuse(self, x: Tensor, *only: Tensor) -> Tensors | None:
        """Return the own block's only part as the result, or None if it must be copied."""

    def _pack(self, event: Event) -> None:
        self.roots[event.number, 0] = self._departing_part(event, self._round(event).held)
        self.ready[event.number, 0] = self.rings.inner.mark(self.device)

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
        self.ready[event.number, event.round] = self.rings.inner.mark(self.device)

    def _fetch(self, event: Event) -> None:
        stage, packing, puts = self._stage(event), self._pass(event).packing, list[Put]()
        key = event.number, event.round
        root, ready = self.roots[key], self.ready[key]
        for peer, span, at, total in stage.sends:
            puts += packing.puts(root, span, peer, at, total)
        self.fetched.append(
            self._deliver("visit", packing, stage.tokens, puts, stage.sources, ready)
        )

    def _own(self, event: Event) -> None:
        found = [*self.attention.compute(self.program.own, self.queries, self.keys)]
        for i, (x, earlier) in enumerate(self.likes):
            parts, whole = [each[i] for each in found], [(0, x.shape[1])]
            self.own_parts.append(parts)
            if earlier is not None:
                parts.insert(0, (whole, earlier))
                self.results.append((earlier,))
            elif is_whole(parts, x.shape[1]) and (only := self._reuse(x, *parts[0][1:])):
                self.results.append(only)
                continue
            elif self.program.has_one_stage and i == 0:
                # A single partial result may be the result itself. Not so dk and dv: their parts
                # lie in memory that is received into.
                self.results.append(())
            else:
                self.results.append(self.summing.new(x.shape, x.dtype, x.device))
            if not self.program.passes:
                self._begin_sum(i, ALL).result()

    def _begin(self, event: Event) -> None:
        pass_, count = self._pass(event), len(self.results)
        heads = (pass_.kv if i else pass_.q for i in range(count))
        self.sums[event.number] = list(map(self._begin_sum, range(count), heads))

    def _begin_sum(self, i: int, heads: slice) -> Sum:
        """Begin the sum of some heads of a result with the own block's share."""
        into, parts = self.results[i], self.own_parts[i]
        if heads != ALL:
            into = _select_heads(into, heads)
            parts = [(spans, *_select_heads(tensors, heads)) for spans, *tensors in parts]
        x = into[0] if into else self.likes[i][0]
        return self.summing(x.shape, x.dtype, x.device, self.limit, into or None, parts)

    def _land(self, event: Event) -> None:
        self.landed.append(self.fetched.pop(0))  # of two stages, the one that was fetched first
        self.landed[-1].wait()
        if event.stage + 1 == len(self._round(event).stages):
            # deliveries keep what they send until they are released
            del self.roots[event.number, event.round]

    def _compute(self, event: Event) -> None:
        calls, payload = self.program.calls[event.round, event.stage], self.program.payload
        pass_, is_root = self._pass(event), event.stage < 0
        tensors: Sequence[Tensor]
        if is_root:  # nothing reads it later if no other rank of this host needs it
            key = event.number, event.round
            tensors = self.roots[key] if self._round(event).stages else self.roots.pop(key)
        else:
            tokens = self._stage(event).tokens
            tensors = pass_.packing.views(self.landed[-1].memory, tokens)
            self.computed = self._empty_sums(event, tokens, None)
        if not calls:
            return
        queries: Any = self.queries.part(ALL, pass_.q)
        keys: Any = self.keys.part(ALL, pass_.kv)
        if payload.sends_queries:
            queries = payload.arrive(tensors)
        else:
            keys = payload.arrive(tensors)
        sums = [*self.sums[event.number]]
        sums[self.sent] = self._sent_sums(event) if is_root else self.computed
        for parts in self.attention.of_heads(pass_.q).compute(calls, queries, keys):
            for total, part in zip(sums, parts, strict=True):
                total.add(*part)

    def _free(self, event: Event) -> None:
        self.landed.pop().release()

    def _return(self, event: Event) -> None:
        stage, packing, puts = self._stage(event), self._pass(event).return_packing, list[Put]()
        for out in stage.returns:
            # each batch row is a message of its own, so only rows need be contiguous
            found = [x for total in self.computed for x in total.sent(out.span)]
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
        results = [total.result() for total in self.sums.pop(event.number)]
        if self.program.has_one_stage:
            self.results = results
        if event.stage >= 0:
            self.returning.pop().release()

    def _leave(self, event: Event) -> None:
        round_, packing = self._round(event), self._pass(event).return_packing
        sums = self._sent_sums(event) if round_.landing.tokens else ()
        share = [x.contiguous() for total in sums for x in total.sent((0, round_.landing.tokens))]
        self.root_sums.pop((event.number, event.round), None)
        owner, tokens = round_.root // self.rings.inner.size, sum(map(length, round_.lent))
        self.leaving.append(self._exchange(share, owner, packing, tokens, round_.lent_to))

    def _receive(self, event: Event) -> None:
        ticket, results = self.leaving.pop()
        ticket.wait()
        if results:
            add_sent(self.sums[event.number][self.sent], self._round(event).lent, results)

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
            add_sent(sums, [shifted(out.span, first)], [tokens_at(view, at) for view in views])
        return sums

    def _sent_sums(self, event: Event) -> list[Sum]:
        """Return the sums of the sent side: of the own tokens, or of a later round's root."""
        key = event.number, event.round
        if not event.round:
            return self.sums[event.number][self.sent]
        if key not in self.root_sums:
            tokens = self._round(event).landing.tokens
            self.root_sums[key] = self._empty_sums(event, tokens, self.limit)
        return self.root_sums[key]

    def _empty_sums(self, event: Event, tokens: int, limit: float | None) -> list[Sum]:
        """Return sums of the sent side for other tokens, in the dtypes in which they are sent."""
        sums, entries = self.sums[event.number][self.sent], self._pass(event).return_packing.entries
        dtypes = (dtype for _, dtype in entries)
        return [total.like(tokens, of, limit) for total, of in zip(sums, dtypes, strict=False)]

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

    def _exchange(
        self, there: Sequence[Tensor], to: int, packing: Packing, tokens: int, source: int
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
        ready: Any = None,
    ) -> Delivery:
        """Start a delivery. `tokens` tokens land here: a span from each place of `sources`."""
        inner = self.rings.inner
        # A rank waits for no message from itself: it copies those tokens when it sends.
        others = [(peer, at) for peer, at in sources if peer != inner.rank]
        arrivals = [x for peer, at in others for x in packing.arrivals(peer, at, tokens)]
        return inner.deliver(lane, packing.nbytes(tokens), puts, arrivals, self.device, ready)


class Forward(Execution):
    """The forward. It merges partial outputs of the own queries. If queries are sent, partial
    outputs are returned, and their owner merges them.
    """

    # Partial outputs are read again each time they are folded, and hold memory until then.
    summing, waiting = Outputs, 4

    attention: Attention

    def _reuse(self, x: Tensor, *only: Tensor) -> Tensors | None:
        # Nobody else may rely on the kernel's memory if stages are merged into it.
        out, lse = only
        has_passes = bool(self.program.passes)
        if (
            out.dtype != x.dtype
            or not self.attention.is_complete(self.program.own[0])
            or (has_passes and not self.attention.writes_new_memory)
        ):
            return None
        return out, lse.clone() if has_passes else lse


class Backward(Execution):
    """The backward. It adds up the gradients of the side that stays. Gradients of the side that is
    sent are returned, and their owner adds them up.
    """

    # Memory is short in the backward, and its kernels take longer.
    summing, waiting = Sum, 1.25

    def _reuse(self, x: Tensor, *only: Tensor) -> Tensors | None:
        return (only[0].to(x.dtype).contiguous(),)


def add_sent(sums: Sequence[Sum], spans: Sequence[Span], tensors: Sequence[Tensor]) -> None:
    """Add the results of some tokens, as they were sent, to `sums`."""
    count = len(tensors) // len(sums)  # a gradient, or out and lse
    for i, total in enumerate(sums):
        total.add_sent(spans, *tensors[count * i : count * (i + 1)])


def _select_heads(tensors: Sequence[Tensor], heads: slice) -> Tensors:
    """Return views of some heads of a gradient (B, T, H, D), or of out and its lse (B, H, T)."""
    x, *lse = tensors
    return x[:, :, heads], *(rows[:, heads] for rows in lse)
