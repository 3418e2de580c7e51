"""Runs the program of a rank: what each event does with tensors. The order of events is not decided here.

`routes` says which tokens go where, a transport moves bytes, a kernel computes, `merge` adds up.

Letters: B batch, S tokens of a rank, H query heads, G kv heads, D head size. All that travels is (B, S, heads, ...).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.packed import current_stream, sent
from ...merge import Gradients, OutputPart, Outputs, Part, empty_lse, is_whole, sum_parts, tokens_at
from ...rings import Rings
from ...scores import is_one_row
from ...span import Span, length, shifted
from ...tiling import Cut
from ...transport import Arrival, Delivery, Parcel, Ticket
from ...transport.packing import Packing
from .. import Problem
from ..compute import Attention, Keys, Queries, Side, gradients, outputs
from .payload import Payload
from .program import Event
from .routes import Landing, Outgoing, Round, Stage

# Partial results are read once more each time they are folded, and stay in memory until they are: so many groups' bytes
# of them wait. In the backward memory is short and kernels take longer.
_OUTPUTS_WAITING = 4
_GRADIENTS_WAITING = 1.25


@dataclass(frozen=True)
class Pass:
    """A way round the ring: the heads that go together, slices of q's and k's, and how they lie in memory."""

    q: slice
    kv: slice
    packing: Packing
    return_packing: Packing


@dataclass(frozen=True, eq=False)
class Tour:
    """All that a rank does in a call or its backward, but for the tensors.

    own     kernel calls of the own block
    cuts    kernel calls of the tiles of each stage and of each root, by (round, stage) and (round, -1)
    """

    problem: Problem
    rank: int
    payload: Payload
    own: Sequence[Cut]
    passes: Sequence[Pass]
    rounds: Sequence[Round]
    cuts: dict[tuple[int, int], Sequence[Cut]]
    program: Sequence[Event]
    manifests: dict[Event, Manifest] = field(default_factory=dict)  # of fetches and returns, once they were made

    def manifest(self, event: Event) -> Manifest:
        """The messages of a fetch or a return."""
        found = self.manifests.get(event)
        if found is None:
            stage, pass_ = self.rounds[event.round].stages[event.stage], self.passes[event.number]
            if event.do == "fetch":
                found = _manifest(pass_.packing, stage.tokens, stage.sources, stage.sends)
            else:
                sources = [(entry.peer, entry.at) for entry in stage.homecoming]
                found = _manifest(pass_.return_packing, stage.home_tokens, sources, stage.returns)
            self.manifests[event] = found
        return found

    def tokens(self, key: tuple[int, int] | None, device: torch.device) -> Tensor | None:
        """`Scores.tokens` of what lands in a stage or is there of a root, by the key of its calls; None: of the own.

        None where there are no scores, or no calls.
        """
        return None if self.problem.scores is None else _tokens(self, device, current_stream(device)).get(key)

    def __str__(self) -> str:
        """The program, with what moves and what is computed."""
        lines = [f"{type(self.payload).__name__} travel in {len(self.passes)} passes; pass, round, stage:"]
        for event in self.program:
            lines.append(f"  {event}{self._detail(event)}")
        return "\n".join(lines)

    def _detail(self, event: Event) -> str:
        round_ = self.rounds[event.round] if self.rounds else None
        if event.do == "own":
            return f"  {_shown(self.own)}"
        if event.do in ("compute", "open"):
            return f"  {_shown(self.cuts[event.round, event.stage if event.do == 'compute' else -1])}"
        if event.do in ("fetch", "return"):
            stage = round_.stages[event.stage]
            sends = stage.sends if event.do == "fetch" else stage.returns
            landing = stage.tokens if event.do == "fetch" else stage.home_tokens
            there = ", ".join(f"{length(out.span)} to {out.peer}" for out in sends) or "none"
            return f"  {there}; {landing} tokens land"
        return ""


class Manifest(NamedTuple):
    """The messages of a delivery: `nbytes` land in all, at `arrivals`.

    departures  (tokens, peer, messages) of each part that leaves; a message is (tensor, batch row, byte offset there)
    """

    nbytes: int
    arrivals: Sequence[Arrival]
    departures: Sequence[tuple[Span, int, Sequence[tuple[int, int, int]]]]


def _manifest(
    packing: Packing, tokens: int, sources: Sequence[tuple[int, Span]], sends: Sequence[Outgoing]
) -> Manifest:
    """Of `tokens` that land, parts of them from each of `sources` (place, part), and of what is sent."""
    arrivals = [Arrival(peer, at, size) for peer, part in sources for _, _, at, size in packing.messages(tokens, part)]
    departures = []
    for peer, span, at, total in sends:
        messages = packing.messages(total, (at, at + length(span)))
        departures.append((span, peer, [(index, row, offset) for index, row, offset, _ in messages]))
    return Manifest(packing.nbytes(tokens), arrivals, departures)


@functools.lru_cache(maxsize=8)  # large on GPUs where every step has scores of its own
def _tokens(tour: Tour, device: torch.device, stream: torch.cuda.Stream | None) -> dict[tuple[int, int] | None, Tensor]:
    """What `Tour.tokens` returns, for work on `stream`, in one piece of memory."""
    own = tour.problem.layout.positions(tour.rank)
    positions = {None: own} | {key: _positions(tour, *key) for key, cuts in tour.cuts.items() if cuts}
    tokens = sent(tour.problem.scores.tokens(torch.cat([*positions.values()])), device)
    return dict(zip(positions, tokens.split([len(x) for x in positions.values()], 1), strict=True))


def _positions(tour: Tour, number: int, stage: int) -> Tensor:
    """Of the tokens of a stage, or with stage -1 of a root."""
    round_ = tour.rounds[number]
    if stage < 0:
        return landing_positions(round_.landings, round_.held_tokens)
    return landing_positions(round_.stages[stage].landings, round_.stages[stage].tokens)


def landing_positions(landings: Sequence[Landing], tokens: int) -> Tensor:
    """(tokens,) of a stage or a root as they lie in memory; 0 of those that nobody here sees."""
    positions = torch.zeros(tokens, dtype=torch.int64)
    for (start, step, _, span), _, at in landings:
        positions[slice(*at)] = torch.arange(start, start + step * length(span), step)
    return positions


def _shown(cuts: Sequence[Cut]) -> str:
    """Kernel calls in a few words."""
    calls = [f"{cut.call.q_tokens} x {cut.call.kv_tokens} in {len(cut.call.tiles)} tiles" for cut in cuts]
    return f"{len(cuts)} kernel calls: {', '.join(calls)}" if cuts else "nothing"


class Execution:
    """Runs a tour once: moves blocks. What is computed of them is a subclass's.

    leaving  the side of the own block that others look at
    """

    def __init__(self, tour: Tour, rings: Rings, attention: Attention, leaving: Side):
        self.tour, self.rings, self.attention, self.leaving = tour, rings, attention, leaving
        self.roots: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by pass and round
        self.crossing: tuple[Ticket, tuple[Tensor, ...]] | None = None
        self.fetched: list[Delivery] = []
        self.here: Delivery | None = None

    def run(self) -> None:
        try:
            for event in self.tour.program:
                getattr(self, f"_{event.do}")(event)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """If the run was broken off, the next call must find all as it should be."""
        if self.here:
            self.here.release()
        for delivery in self.fetched:
            delivery.wait()
            delivery.release()
        if self.crossing:
            self.crossing[0].wait()

    def _pass(self, event: Event) -> Pass:
        return self.tour.passes[event.number]

    def _round(self, event: Event) -> Round:
        return self.tour.rounds[event.round]

    def _stage(self, event: Event) -> Stage:
        return self._round(event).stages[event.stage]

    def _leaving_part(self, event: Event, spans: Sequence[Span]) -> tuple[Tensor, ...]:
        """What travels of own tokens, contiguous."""
        pass_, payload = self._pass(event), self.tour.payload
        if not any(map(length, spans)):
            return ()
        side = self.leaving.part((0, None), pass_.q if payload.queries_travel else pass_.kv)
        return payload.depart(side.at(spans))

    def _pack(self, event: Event) -> None:
        self.roots[event.number, 0] = self._leaving_part(event, self.tour.rounds[0].held)

    def _cross(self, event: Event) -> None:
        round_ = self._round(event)
        there = self._leaving_part(event, round_.lent)
        here = self._pass(event).packing.empty(round_.held_tokens, self._device()) if round_.held_tokens else ()
        self.crossing = self._exchange(there, round_.lent_to, here, round_.root // self.rings.inner.size), here

    def _arrive(self, event: Event) -> None:
        ticket, self.roots[event.number, event.round] = self.crossing
        self.crossing = None
        ticket.wait()

    def _fetch(self, event: Event) -> None:
        manifest, root = self.tour.manifest(event), self.roots[event.number, event.round]
        parcels = [
            Parcel(root[index][row, start:stop], peer, offset)
            for (start, stop), peer, messages in manifest.departures
            for index, row, offset in messages
        ]
        self.fetched.append(self._deliver("visit", manifest, parcels))

    def _land(self, event: Event) -> None:
        self.here = self.fetched.pop(0)
        self.here.wait()
        if event.stage + 1 == len(self._round(event).stages):
            del self.roots[event.number, event.round]  # all has left

    def _free(self, event: Event) -> None:
        self.here.release()
        self.here = None

    def _landed(self, event: Event) -> Side:
        """The block that landed, good until it is freed."""
        tensors = self._pass(event).packing.views(self.here.memory, self._stage(event).tokens)
        return self._arrived(tensors, (event.round, event.stage))

    def _opened(self, event: Event) -> Side | None:
        """The root of a round, None if nothing of it is looked at."""
        key = event.number, event.round
        root = self.roots[key] if self._round(event).stages else self.roots.pop(key)
        return self._arrived(root, (event.round, -1)) if root else None

    def _arrived(self, tensors: tuple[Tensor, ...], key: tuple[int, int]) -> Side:
        block = self.tour.payload.arrive(tensors, self.tour.problem.takes_delta)
        return replace(block, tokens=self.tour.tokens(key, self._device()))

    def _exchange(self, sends: Sequence[Tensor], to: int, recvs: Sequence[Tensor], source: int) -> Ticket:
        """Starts an exchange between hosts."""
        return self.rings.outer.exchange([(x, to) for x in sends], [(x, source) for x in recvs])

    def _deliver(self, lane: str, manifest: Manifest, parcels: Sequence[Parcel]) -> Delivery:
        return self.rings.inner.deliver(lane, manifest.nbytes, parcels, manifest.arrivals, self._device())

    def _device(self) -> torch.device:
        return (self.leaving.q if isinstance(self.leaving, Queries) else self.leaving.k).device


class Forward(Execution):
    """The forward: partial outputs of the own queries merge here."""

    def __init__(self, tour: Tour, rings: Rings, queries: Queries, keys: Keys, table: Tensor | None):
        queries, keys = (replace(side, tokens=tour.tokens(None, queries.q.device)) for side in (queries, keys))
        super().__init__(tour, rings, Attention.begin(tour.problem, queries, table), keys)
        self.queries = queries
        self.parts: list[OutputPart] = []  # of the own block
        self.out = self.lse = self.total = None

    def result(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Runs; out (B, S, H, D), lse (B, H, S) and, with a bias, the row_lse of it."""
        self.run()
        return self.out, self.lse, self.attention.bias and self.attention.bias.row_lse

    def _own(self, event: Event) -> None:
        q = self.queries.q
        self.parts = list(outputs(self.attention, self.tour.own, self.queries, self.leaving))
        if (
            is_whole(self.parts, q.shape[1])
            and not is_one_row(self.tour.own[0].row)  # else out does not know of the bias, only the merged one does
            and self.parts[0][1].dtype == q.dtype
            and (self.attention.writes_new_memory or not self.tour.passes)
        ):
            _, self.out, self.lse = self.parts[0]
            if self.tour.passes:
                self.lse = self.lse.clone()
            return
        self.out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.lse = empty_lse(q)
        if not self.tour.passes:
            self._total(slice(None)).result()

    def _begin(self, event: Event) -> None:
        self.total = self._total(self._pass(event).q)

    def _open(self, event: Event) -> None:
        if block := self._opened(event):
            self._attend(event, (event.round, -1), block)

    def _compute(self, event: Event) -> None:
        self._attend(event, (event.round, event.stage), self._landed(event))

    def _end(self, event: Event) -> None:
        self.total.result()
        self.total = None

    def _total(self, heads: slice) -> Outputs:
        """The sum of some heads, begun with the own block's share."""
        limit = _OUTPUTS_WAITING * self.tour.problem.group_bytes
        parts = ((spans, out[:, :, heads], lse[:, heads]) for spans, out, lse in self.parts)
        return Outputs(self.out[:, :, heads], self.lse[:, heads], limit, parts)

    def _attend(self, event: Event, key: tuple[int, int], block: Keys) -> None:
        heads = self._pass(event).q
        for part in outputs(self.attention.of(heads), self.tour.cuts[key], self.queries.part((0, None), heads), block):
            self.total.add(*part)


class Backward(Execution):
    """The backward: gradients of one side stay and add up here, those of the other go home and add up there."""

    def __init__(
        self,
        tour: Tour,
        rings: Rings,
        queries: Queries,
        keys: Keys,
        table: Tensor | None,
        row_lse: Tensor | None,
    ):
        queries, keys = (replace(side, tokens=tour.tokens(None, queries.q.device)) for side in (queries, keys))
        if table is not None and queries.delta is None and tour.problem.takes_delta:
            queries = queries.with_delta()  # which the table's gradient needs; many calls need not gather out
        travelling, staying = (queries, keys) if tour.payload.queries_travel else (keys, queries)
        super().__init__(tour, rings, Attention.begin(tour.problem, queries, table, row_lse), travelling)
        self.queries, self.keys, self.staying = queries, keys, staying
        inputs = queries.q, keys.k, keys.v
        self.own_parts: tuple[list[Part], ...] = ([], [], [])  # of dq, dk and dv
        self.grads = [torch.empty(0)] * len(inputs)
        self.inputs = inputs
        self.sums: dict[int, list[Gradients]] = {}  # of dq, dk, dv, by pass
        self.shares: dict[tuple[int, int], list[Gradients]] = {}  # of a root's gradients, by pass and round
        self.taken: list[list[Part]] = []  # of what travels, in a stage
        self.returning: Delivery | None = None
        self.leaving_host: tuple[Ticket, tuple[Tensor, ...]] | None = None

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Runs; dq, dk and dv in the inputs' dtype and, with a bias, this rank's share of its table's gradient."""
        self.run()
        dq, dk, dv = self.grads
        return dq, dk, dv, self.attention.bias and self.attention.bias.dtable

    def _let_go(self) -> None:
        super()._let_go()
        if self.returning:
            self.returning.wait()
            self.returning.release()
        if self.leaving_host:
            self.leaving_host[0].wait()

    def _own(self, event: Event) -> None:
        tour = self.tour
        for rows, columns, grads in gradients(self.attention, tour.own, self.queries, self.keys):
            for parts, spans, grad in zip(self.own_parts, (rows, columns, columns), grads, strict=True):
                parts.append((spans, grad))
        for i, (parts, x) in enumerate(zip(self.own_parts, self.inputs, strict=True)):
            whole = is_whole(parts, x.shape[1])
            self.grads[i] = parts[0][1].to(x.dtype).contiguous() if whole else torch.empty_like(x)
        if not self.tour.passes:
            for total in self._totals(slice(None), slice(None)):
                total.result()

    def _begin(self, event: Event) -> None:
        pass_ = self._pass(event)
        self.sums[event.number] = self._totals(pass_.q, pass_.kv)

    def _totals(self, q_heads: slice, kv_heads: slice) -> list[Gradients]:
        """The sums of some heads, begun with the own block's share."""
        totals = []
        for parts, into, heads in zip(self.own_parts, self.grads, (q_heads, kv_heads, kv_heads), strict=True):
            into, parts = into[:, :, heads], ((spans, part[:, :, heads]) for spans, part in parts)
            totals.append(Gradients(into.shape, into.dtype, into.device, self._limit(), into, parts))
        return totals

    def _limit(self) -> int:
        return int(_GRADIENTS_WAITING * self.tour.problem.group_bytes)

    def _open(self, event: Event) -> None:
        if block := self._opened(event):
            for going, spans in self._differentiate(event, (event.round, -1), block):
                _add(self._share(event), spans, going)

    def _compute(self, event: Event) -> None:
        self.taken = [[] for _ in self._travelling_sums(event.number)]
        for going, spans in self._differentiate(event, (event.round, event.stage), self._landed(event)):
            for parts, grad in zip(self.taken, going, strict=True):
                parts.append((spans, grad))

    def _differentiate(
        self, event: Event, key: tuple[int, int], block: Side
    ) -> Iterator[tuple[Sequence[Tensor], Sequence[Span]]]:
        """Adds gradients of the side that stays to its sums; yields those of the travelling side, and its spans."""
        tour, pass_, travels = self.tour, self._pass(event), self.tour.payload.queries_travel
        here = self.staying.part((0, None), pass_.kv if travels else pass_.q)
        queries, keys = (block, here) if travels else (here, block)
        attention = self.attention.of(pass_.q)
        for rows, columns, (dq, *dkv) in gradients(attention, tour.cuts[key], queries, keys):
            mine, spans = (dkv, columns) if travels else ((dq,), rows)
            _add(self._staying_sums(event.number), spans, mine)
            yield ((dq,), rows) if travels else (dkv, columns)

    def _return(self, event: Event) -> None:
        manifest, packing = self.tour.manifest(event), self._pass(event).return_packing
        parcels: list[Parcel] = []
        for span, peer, messages in manifest.departures:
            grads = [
                sum_parts(parts, span, packing.batch, *row, self._device())
                for parts, row in zip(self.taken, packing.rows, strict=True)
            ]
            parcels += [Parcel(grads[index][row].contiguous(), peer, offset) for index, row, offset in messages]
        self.taken = []
        self.returning = self._deliver("return", manifest, parcels)

    def _collect(self, event: Event) -> None:
        sums = self._add_returned(event)
        if self.returning.recycled:
            for total in sums:
                total.fold()
        self._release_returned()

    def _end(self, event: Event) -> None:
        if event.stage >= 0:
            self._add_returned(event)
        for total in self.sums.pop(event.number):
            total.result()
        if event.stage >= 0:
            self._release_returned()

    def _add_returned(self, event: Event) -> list[Gradients]:
        """Waits for the gradients of a stage, adds them to the root's sums and returns these."""
        stage, round_ = self._stage(event), self._round(event)
        self.returning.wait()
        sums = self._share(event) if event.round else self._travelling_sums(event.number)
        first = 0 if event.round else round_.held[0][0]
        views = self._pass(event).return_packing.views(self.returning.memory, stage.home_tokens)
        for entry in stage.homecoming:
            for total, grad in zip(sums, views, strict=True):
                total.add([shifted(entry.span, first)], tokens_at(grad, entry.at))
        return sums

    def _release_returned(self) -> None:
        self.returning.release()
        self.returning = None

    def _leave(self, event: Event) -> None:
        round_, dtype = self._round(event), self.tour.problem.sizes.partial
        share = [total.result(dtype) for total in self._share(event)] if round_.held_tokens else ()
        self.shares.pop((event.number, event.round), None)
        packing = self._pass(event).return_packing
        here = packing.empty(round_.lent_tokens, self._device()) if round_.lent_tokens else ()
        owner = round_.root // self.rings.inner.size
        self.leaving_host = self._exchange(share, owner, here, round_.lent_to), here

    def _receive(self, event: Event) -> None:
        ticket, grads = self.leaving_host
        ticket.wait()
        self.leaving_host = None
        if grads:
            _add(self._travelling_sums(event.number), self._round(event).lent, grads)

    def _share(self, event: Event) -> list[Gradients]:
        """This host's share of the gradients of what it has of a root."""
        key, tokens = (event.number, event.round), self._round(event).held_tokens
        if key not in self.shares:
            own = self._travelling_sums(event.number)
            shapes = [(x.shape[0], tokens, *x.shape[2:]) for x in own]
            pairs = zip(shapes, own, strict=True)
            self.shares[key] = [Gradients(shape, x.dtype, x.device, self._limit()) for shape, x in pairs]
        return self.shares[key]

    def _travelling_sums(self, number: int) -> list[Gradients]:
        return self.sums[number][:1] if self.tour.payload.queries_travel else self.sums[number][1:]

    def _staying_sums(self, number: int) -> list[Gradients]:
        return self.sums[number][1:] if self.tour.payload.queries_travel else self.sums[number][:1]


def _add(sums: Sequence[Gradients], spans: Sequence[Span], grads: Sequence[Tensor]) -> None:
    """Adds to each of `sums` its gradient (B, T, ...) of the tokens of rising spans."""
    for total, grad in zip(sums, grads, strict=True):
        total.add(spans, grad)
