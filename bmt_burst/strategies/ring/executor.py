"""The executor: it runs a rank's events with tensors. It does not decide their order.

`routes` says which tokens are sent where, a transport moves bytes, a kernel computes, and `merge`
adds up.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that is sent is
(B, S, heads, ...).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import torch
from torch import Tensor

from ...kernels.packed import current_stream, send_to_device
from ...merging.merge import Gradients, Outputs, empty_lse, sum_parts
from ...merging.parts import OutputPart, Part, is_whole, tokens_at
from ...ranks.rings import Rings
from ...scores import Scores, is_one_row
from ...sequence.span import Span, length, shifted
from ...sequence.tiling import GatheredCall
from ...transport import Delivery, Manifest, Ticket
from ...transport.packing import Packing
from .. import Problem
from ..compute import (
    ALL,
    Attention,
    AttentionGradient,
    Keys,
    Queries,
    QueryGradients,
    Side,
    compute_gradients,
    compute_outputs,
)
from .events import Event
from .payload import KeysValues, Payload, QueryPayload
from .routes import Landings, Round, Stage

# Partial results are read again each time they are folded, and hold memory until then. So this many
# times group_bytes of them may wait. In the backward memory is short and kernels take longer.
_OUTPUTS_WAITING = 4
_GRADIENTS_WAITING = 1.25


@dataclass(frozen=True)
class Pass:
    """The heads that are sent together around the ring: slices of q's and k's heads, and how the
    tensors lie in memory.
    """

    q: slice
    kv: slice
    packing: Packing
    return_packing: Packing


@dataclass(frozen=True, eq=False)
class Program:
    """A rank's part in a call or its backward, without tensors.

    own    kernel calls of the own block
    calls  kernel calls of each stage by (round, stage), and of each root by (round, -1)
    """

    problem: Problem
    rank: int
    payload: Payload
    own: Sequence[GatheredCall]
    passes: Sequence[Pass]
    rounds: Sequence[Round]
    calls: Mapping[tuple[int, int], Sequence[GatheredCall]]
    events: Sequence[Event]
    # of fetches and returns, each made when it is first needed
    manifests: dict[Event, Manifest] = field(default_factory=dict)

    def manifest(self, event: Event) -> Manifest:
        """Return the messages of a fetch or a return."""
        found = self.manifests.get(event)
        if found is None:
            stage, pass_ = self.rounds[event.round].stages[event.stage], self.passes[event.number]
            if event.do == "fetch":
                found = pass_.packing.manifest(stage.tokens, stage.sources, stage.sends)
            else:
                sources = [(entry.peer, entry.at) for entry in stage.incoming_gradients]
                # each part that is returned has tensors of its own
                sends = [(o.peer, (0, length(o.span)), o.at, o.total) for o in stage.returns]
                found = pass_.return_packing.manifest(
                    stage.gradient_tokens, sources, sends, apart=True
                )
            self.manifests[event] = found
        return found

    def tokens(self, key: tuple[int, int] | None, device: torch.device) -> Tensor | None:
        """Return `Scores.tokens` of a stage or a root, by the key of its calls, or of the own
        tokens for None.

        Return None if there are no scores, or no calls.
        """
        if self.problem.scores is None:
            return None
        return _all_tokens(self, self.problem.scores, device, current_stream(device)).get(key)

    def __str__(self) -> str:
        """Show the events with the tokens that they move and the kernel calls that they make."""
        payload, passes = type(self.payload).__name__, len(self.passes)
        lines = [f"{payload} in {passes} pass{'es' * (passes != 1)}; pass, round, stage:"]
        for event in self.events:
            lines.append(f"  {event}{self._detail(event)}")
        return "\n".join(lines)

    def _detail(self, event: Event) -> str:
        if event.do == "own":
            return f"  {_describe(self.own)}"
        if event.do in ("compute", "open"):
            stage_number = event.stage if event.do == "compute" else -1
            return f"  {_describe(self.calls[event.round, stage_number])}"
        if event.do in ("fetch", "return"):
            stage = self.rounds[event.round].stages[event.stage]
            sends = stage.sends if event.do == "fetch" else stage.returns
            landing = stage.tokens if event.do == "fetch" else stage.gradient_tokens
            there = ", ".join(f"{length(out.span)} to {out.peer}" for out in sends) or "none"
            return f"  {there}; {landing} tokens land"
        return ""


@functools.lru_cache(maxsize=8)  # large on GPUs where every step has scores of its own
def _all_tokens(
    program: Program, scores: Scores, device: torch.device, stream: torch.cuda.Stream | None
) -> dict[tuple[int, int] | None, Tensor]:
    """Return the result of `Program.tokens` for each key, in one allocation, for work on
    `stream`.
    """
    positions: dict[tuple[int, int] | None, Tensor] = {
        None: program.problem.layout.positions(program.rank)
    }
    positions |= {
        key: _find_positions(program, *key) for key, calls in program.calls.items() if calls
    }
    tokens = send_to_device(scores.tokens(torch.cat([*positions.values()])), device)
    parts = torch.split(tokens, [len(x) for x in positions.values()], 1)
    return dict(zip(positions, parts, strict=True))


def _find_positions(program: Program, number: int, stage: int) -> Tensor:
    """Return the positions of the tokens of a stage, or for stage -1 of a root."""
    round_ = program.rounds[number]
    if stage < 0:
        return find_landing_positions(round_.landings, round_.held_tokens)
    return find_landing_positions(round_.stages[stage].landings, round_.stages[stage].tokens)


def find_landing_positions(landings: Landings, tokens: int) -> Tensor:
    """Return the positions (tokens,) of a stage or a root as its tokens lie in memory.

    Tokens that no query of this rank sees get 0.
    """
    positions = torch.zeros(tokens, dtype=torch.int64)
    for (start, step, _, span), _, at in landings:
        positions[slice(*at)] = torch.arange(start, start + step * length(span), step)
    return positions


def _describe(calls: Sequence[GatheredCall]) -> str:
    """Describe kernel calls in a few words."""
    sizes = [
        f"{gathered.call.q_tokens} x {gathered.call.kv_tokens} in {len(gathered.call.tiles)} tiles"
        for gathered in calls
    ]
    return f"{len(calls)} kernel calls: {', '.join(sizes)}" if calls else "nothing"


class Execution(ABC):
    """One run of a program. This class moves blocks; subclasses compute with them.

    leaving  the side of the own block that others look at

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
        manifest, root = self.program.manifest(event), self.roots[event.number, event.round]
        self.fetched.append(self._deliver("visit", manifest, root))

    def _land(self, event: Event) -> None:
        self.landed.append(self.fetched.pop(0))
        self.landed[-1].wait()
        if event.stage + 1 == len(self._round(event).stages):
            del self.roots[event.number, event.round]  # all of it was sent

    def _landed_tensors(self, event: Event) -> Sequence[Tensor]:
        """Return the tensors that landed. They are valid until they are freed."""
        return self.landed[-1].views(self.program.manifest(event._replace(do="fetch")))

    def _root_tensors(self, event: Event) -> tuple[Tensor, ...]:
        """Return the tensors of a round's root, or none if this rank looks at nothing of it."""
        key = event.number, event.round
        return self.roots[key] if self._round(event).stages else self.roots.pop(key)

    def _exchange(
        self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int
    ) -> Ticket:
        """Start an exchange between hosts."""
        return self.rings.outer.exchange([(x, to) for x in sends], [(x, source) for x in recvs])

    def _deliver(self, lane: str, manifest: Manifest, tensors: Sequence[Tensor]) -> Delivery:
        return self.rings.inner.deliver_manifest(lane, manifest, tensors, self.device)


class Forward(Execution):
    """The forward. It merges partial outputs of the own queries.

    out, lse  the results, from the event `own` on
    parts     the partial outputs of the own block
    merged    the sum of the current pass
    """

    out: Tensor
    lse: Tensor
    merged: Outputs

    def __init__(
        self,
        program: Program,
        payload: KeysValues,
        rings: Rings,
        queries: Queries,
        keys: Keys,
        table: Tensor | None,
    ):
        device = queries.q.device
        if (tokens := program.tokens(None, device)) is not None:
            queries, keys = replace(queries, tokens=tokens), replace(keys, tokens=tokens)
        self.queries, self.keys = queries, keys
        super().__init__(program, rings, self.keys, device)
        self.payload = payload
        self.attention = Attention.begin(program.problem, queries.q, table)
        self.parts: list[OutputPart] = []

    def result(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run. Return out (B, S, H, D), lse (B, H, S) and, with a bias, its row_lse."""
        self.run()
        return self.out, self.lse, self.attention.row_lse

    def _own(self) -> None:
        q = self.queries.q
        self.parts = list(
            compute_outputs(self.attention, self.program.own, self.queries, self.keys)
        )
        if (
            is_whole(self.parts, q.shape[1])
            # such a call's out does not include the bias, only the merged one does
            and not is_one_row(self.program.own[0].row)
            and self.parts[0][1].dtype == q.dtype
            and (self.attention.writes_new_memory or not self.program.passes)
        ):
            _, self.out, self.lse = self.parts[0]
            if self.program.passes:
                self.lse = self.lse.clone()
            return
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.lse = empty_lse(q)
        if not self.program.passes:
            self._merge_from_own(ALL).result()

    def _begin(self, event: Event) -> None:
        self.merged = self._merge_from_own(self._pass(event).q)

    def _open(self, event: Event) -> None:
        if tensors := self._root_tensors(event):
            self._attend(event, (event.round, -1), tensors)

    def _compute(self, event: Event) -> None:
        self._attend(event, (event.round, event.stage), self._landed_tensors(event))

    def _end(self, event: Event) -> None:
        self.merged.result()
        del self.merged

    def _merge_from_own(self, heads: slice) -> Outputs:
        """Begin the sum of some heads with the own block's share."""
        out, lse, parts = self.out, self.lse, self.parts
        if heads != ALL:
            out, lse = out[:, :, heads], lse[:, heads]
            parts = [(spans, x[:, :, heads], x_lse[:, heads]) for spans, x, x_lse in parts]
        limit = _OUTPUTS_WAITING * self.program.problem.group_bytes
        return Outputs(out, lse, limit, parts)

    def _attend(self, event: Event, key: tuple[int, int], tensors: Sequence[Tensor]) -> None:
        heads = self._pass(event).q
        block = self.payload.arrive(tensors, self.program.tokens(key, self.device))
        queries = self.queries.part(ALL, heads)
        for part in compute_outputs(
            self.attention.of_heads(heads), self.program.calls[key], queries, block
        ):
            self.merged.add(*part)


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
        table: Tensor | None,
        row_lse: Tensor | None,
    ):
        device = queries.q.device
        if (tokens := program.tokens(None, device)) is not None:
            queries, keys = replace(queries, tokens=tokens), replace(keys, tokens=tokens)
        if table is not None and program.problem.takes_delta:
            # the table's gradient needs delta, and then calls need not gather out
            queries = queries.with_delta()
        super().__init__(program, rings, queries if payload.sends_queries else keys, device)
        self.payload, self.queries, self.keys = payload, queries, keys
        self.attention = AttentionGradient.begin(program.problem, queries, table, row_lse)
        self.inputs = queries.q, keys.k, keys.v
        self.own_parts: tuple[list[Part], ...] = ([], [], [])
        self.grads: list[Tensor] = []
        self.sums: dict[int, list[Gradients]] = {}
        self.root_sums: dict[tuple[int, int], list[Gradients]] = {}
        self.computed: list[list[Part]] = []
        self.returning: list[Delivery] = []
        self.leaving_host: list[tuple[Ticket, tuple[Tensor, ...]]] = []

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Run. Return dq, dk and dv in the inputs' dtype and, with a bias, this rank's share of
        dtable.
        """
        self.run()
        dq, dk, dv = self.grads
        return dq, dk, dv, self.attention.dtable

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
            sums.append(Gradients(grad.shape, grad.dtype, grad.device, self._limit(), grad, own))
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
        tokens = program.tokens(key, self.device)
        if isinstance(payload, QueryPayload):
            queries = payload.arrive(tensors, tokens, program.problem.takes_delta)
            keys = self.keys.part(ALL, pass_.kv)
        else:
            queries, keys = self.queries.part(ALL, pass_.q), payload.arrive(tensors, tokens)
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
        manifest, packing = self.program.manifest(event), self._pass(event).return_packing
        grads = [
            sum_parts(parts, out.span, packing.batch, *row, self.device)
            for out in self._stage(event).returns
            for parts, row in zip(self.computed, packing.entries, strict=True)
        ]
        grads = [x if x[0].is_contiguous() else x.contiguous() for x in grads]
        self.computed = []
        self.returning.append(self._deliver("return", manifest, grads))

    def _collect(self, event: Event) -> None:
        sums = self._add_returned(event)
        if self.returning[-1].recycled:
            for total in sums:
                total.fold()
        self.returning.pop().release()

    def _end(self, event: Event) -> None:
        if event.stage >= 0:
            self._add_returned(event)
        for total in self.sums.pop(event.number):
            total.result()
        if event.stage >= 0:
            self.returning.pop().release()

    def _add_returned(self, event: Event) -> list[Gradients]:
        """Wait for the gradients of a stage and add them to the root's sums. Return the sums."""
        stage, round_ = self._stage(event), self._round(event)
        self.returning[-1].wait()
        sums = self._sums_of_root(event) if event.round else self._sent_sums(event.number)
        first = 0 if event.round else round_.held[0][0]
        views = self.returning[-1].views(self.program.manifest(event._replace(do="return")))
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
