"""One call: gather all keys and values that a rank looks at, its own among them, and compute with
them at once.

The ring computes the own block while others arrive, and merges partial results. Where blocks are
short, kernel launches and the host take longer than the exchange. So here each rank first gathers
all it looks at, and then needs one kernel call for each kind of band: for causal documents or a
window, a single one. The backward gathers again, and returns the gradients.

            gather                          compute
    rank 0  k0 | k0 k1 k2 k3                q0 x k0,  q3 x (k0 k1 k2 k3)     causal, in one call
    rank 1  k0 k1 | k0 k1 k2                q1 x (k0 k1),  q2 x (k0 k1 k2)

The picture shows two ranks with a causal mask and layout zigzag. The tiles of a kernel call share
no keys, so some keys land twice. With a causal mask all ranks still receive equally much. If a mask
would let tokens land more often, or if a layout has steps, each token lands once, and there are
several calls with partial results.

Letters: B batch, S tokens of a rank, T tokens that land, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..merging.merge import Gradients, Outputs, empty_lse, sum_parts
from ..merging.parts import Part, is_whole, tokens_at
from ..ranks.rings import Rings
from ..sequence.gathered_calls import GatheredCall, kernel_calls
from ..sequence.span import Span, in_turn, length, shifted
from ..sequence.tile import TileFields
from ..sequence.tiling import Tiling
from ..transport import Arrival, Put
from ..transport.packing import Packing
from . import Plan, Problem, Saved, Strategy, spread_ranks
from .compute import (
    Attention,
    AttentionGradient,
    Keys,
    Queries,
    QueryGradients,
    compute_gradients,
    compute_outputs,
)
from .machine import HostWork, Machine
from .ring import RingPlan
from .ring.timeline import kernel_seconds

_MOST_COPIES = 2  # of a rank's tokens that land on a rank, on average
_ALIGNED = 1 << 12  # bytes by which aligned tensors may be longer than their tokens


class OneCall(Strategy):
    """A strategy without partial results, for short blocks."""

    name = "one-call"
    automatic = False

    def refuses(self, problem: Problem) -> str | None:
        if problem.outer > 1:
            return (
                f"expected a single group, got a double_group of {problem.outer} x {problem.inner}"
            )
        return "it does not support a bias" if problem.scores else None

    def plan(self, problem: Problem, rank: int) -> Plan:
        """Return the part of `rank`. It is the ring's if no rank looks at another's tokens."""
        plan = OneCallPlan(problem, rank)
        return plan if plan.has_traffic else RingPlan(problem, rank)

    def predict(self, problem: Problem, machine: Machine) -> float | None:
        whole = OneCallPlan(problem, 0)
        # What each rank looks at takes longer to find.
        if max(whole.lanes.values()) > problem.group_bytes or not whole.has_traffic:
            return None
        plans = [OneCallPlan(problem, r, whole.gathered) for r in spread_ranks(problem.inner)]
        return max(plan.predict(machine) for plan in plans)


class Piece(NamedTuple):
    """Tokens `span` of the shard of `owner`, which land at tokens `at`."""

    owner: int
    span: Span
    at: Span


@dataclass(frozen=True)
class Gathered:
    """The keys that a rank gathers, and how its queries look at them.

    pieces  in the order in which they land, without gaps
    tiles   the rank's queries and the gathered keys
    """

    pieces: Sequence[Piece]
    tiles: Sequence[TileFields]

    @property
    def tokens(self) -> int:
        """The number of tokens that land."""
        return self.pieces[-1].at[1] if self.pieces else 0

    def of(self, owner: int) -> list[Piece]:
        """Return the pieces of an owner."""
        return [piece for piece in self.pieces if piece.owner == owner]


class OneCallPlan(Plan):
    """The exchanges and the kernel calls of one rank.

    gathered  the keys that each rank gathers, if they are known
    """

    def __init__(self, problem: Problem, rank: int, gathered: list[Gathered] | None = None):
        self.problem, self.rank = problem, rank
        if gathered is not None:
            self.gathered = gathered
        sizes = problem.sizes
        entry = (sizes.kv_heads, sizes.head_size)
        self.packing = Packing(sizes.batch, ((entry, sizes.dtype),) * 2)
        self.return_packing = Packing(sizes.batch, ((entry, sizes.partial),) * 2)

    @functools.cached_property
    def gathered(self) -> list[Gathered]:
        """The keys that each rank gathers."""
        problem = self.problem
        tiling, most = Tiling(problem.mask, problem.layout), _MOST_COPIES * problem.most_tokens
        owners = _Owners(tiling)
        return [gather(tiling, owners, rank, most) for rank in owners.ranks]

    @property
    def has_traffic(self) -> bool:
        """Whether any rank looks at another's tokens."""
        return any(
            piece.owner != rank
            for rank, gathered in enumerate(self.gathered)
            for piece in gathered.pieces
        )

    @functools.cached_property
    def calls(self) -> list[GatheredCall]:
        """The kernel calls on this rank's queries and the gathered keys."""
        return kernel_calls(self._mine.tiles)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, None]:
        attention = Attention(self.problem.kernel, self.problem.spec)
        with self.gather_keys(rings, k, v) as keys:
            parts = list(compute_outputs(attention, self.calls, Queries(q), keys))
        if is_whole(parts, q.shape[1]) and parts[0][1].dtype == q.dtype:
            return parts[0][1], parts[0][2], None
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), empty_lse(q)
        Outputs(out, lse, parts=parts).result()
        return out, lse, None

    def backward(
        self, rings: Rings, dout: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = saved.q, saved.k, saved.v
        queries = QueryGradients(q, dout, saved.lse, saved.out)
        attention = AttentionGradient(self.problem.kernel, self.problem.spec)
        of_queries: list[Part] = []
        of_keys: tuple[list[Part], list[Part]] = [], []
        with self.gather_keys(rings, k, v) as keys:
            for rows, columns, (dq, *grads) in compute_gradients(
                attention, self.calls, queries, keys
            ):
                of_queries.append((rows, dq))
                for parts, grad in zip(of_keys, grads, strict=True):
                    parts.append((columns, grad))
        dk, dv = self._return_gradients(rings, of_keys, k)
        return Gradients(q.shape, q.dtype, q.device, parts=of_queries).result(), dk, dv, None

    @property
    def lanes(self) -> dict[str, int]:
        """The most bytes that land at once in each lane."""
        problem = self.problem
        others, most = problem.inner - 1, _MOST_COPIES * problem.most_tokens
        visit, returned = (p.token_bytes() * most for p in (self.packing, self.return_packing))
        return {"visit": (others + 1) * visit + _ALIGNED, "return": others * returned + _ALIGNED}

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        rings.reserve(self.lanes if with_backward else {**self.lanes, "return": 0}, device)

    def predict(self, machine: Machine) -> float:
        """Return the seconds of a forward and backward: those of the GPU, or the host's if these
        are more. Exchanges and kernels follow one another.
        """
        rates, sizes = machine.rates, self.problem.sizes
        arriving, leaving = (sum(length(p.at) for p in pieces) for pieces in self._exchanged)
        token = 2 * self.packing.token_bytes() + self.return_packing.token_bytes()
        seconds = max(arriving, leaving) * token / rates.bytes
        for returning in (False, True):
            seconds += kernel_seconds(self.calls, sizes, rates, returning)
        return max(seconds, machine.host_seconds(self.host_work()))

    def host_work(self) -> HostWork:
        """Return what the host enqueues for a forward and backward."""
        arriving, leaving = map(len, self._exchanged)
        tensors, own = len(self.packing.entries), len(self._mine.of(self.rank))
        messages = tensors * (2 * (leaving + own) + arriving)  # keys twice, and their gradients
        return HostWork(2 * len(self.calls), deliveries=3, messages=messages)

    def __str__(self) -> str:
        calls = ", ".join(
            f"{c.call.q_tokens} x {c.call.kv_tokens} in {len(c.call.tiles)} tiles"
            for c in self.calls
        )
        own = sum(length(piece.at) for piece in self._mine.of(self.rank))
        return (
            f"rank {self.rank}, forward and backward: {self._mine.tokens} tokens land, {own} of "
            f"them its own; {len(self.calls)} kernel calls: {calls}"
        )

    @property
    def _mine(self) -> Gathered:
        return self.gathered[self.rank]

    @functools.cached_property
    def _exchanged(self) -> tuple[list[Piece], list[Piece]]:
        """The keys that other ranks send to this one, and those that this rank sends."""
        arriving = [piece for piece in self._mine.pieces if piece.owner != self.rank]
        leaving = [
            piece
            for viewer, gathered in enumerate(self.gathered)
            for piece in gathered.of(self.rank)
            if viewer != self.rank
        ]
        return arriving, leaving

    def _returned(self, owner: int) -> Iterator[tuple[int, Piece, Span]]:
        """Yield (viewer, piece, place) of the gradients that return to an owner."""
        pieces = [
            (viewer, piece)
            for viewer, gathered in enumerate(self.gathered)
            for piece in gathered.of(owner)
            if viewer != owner
        ]
        places = in_turn(piece.at for _, piece in pieces)
        return ((*pair, at) for pair, (_, at) in zip(pieces, places, strict=True))

    @contextmanager
    def gather_keys(self, rings: Rings, k: Tensor, v: Tensor) -> Iterator[Keys]:
        """Gather the keys and values that this rank looks at, to be read in this context."""
        packing, tensors = self.packing, (k.contiguous(), v.contiguous())
        tokens, puts, arrivals = self._mine.tokens, list[Put](), list[Arrival]()
        for viewer, gathered in enumerate(self.gathered):
            for piece in gathered.of(self.rank):
                puts += packing.puts(tensors, piece.span, viewer, piece.at[0], gathered.tokens)
        for piece in self._mine.pieces:
            if piece.owner != self.rank:
                arrivals += packing.arrivals(piece.owner, piece.at, tokens)
        nbytes = packing.nbytes(tokens)
        delivery = rings.inner.deliver("visit", nbytes, puts, arrivals, k.device)
        delivery.wait()
        try:
            yield Keys(*packing.views(delivery.memory, tokens))
        finally:
            delivery.release()

    def _return_gradients(
        self, rings: Rings, of_keys: tuple[list[Part], list[Part]], k: Tensor
    ) -> list[Tensor]:
        """Return dk and dv of this rank's tokens, from the gradients of all gathered tokens."""
        packing, tokens = self.return_packing, self._mine.tokens
        computed = [
            sum_parts(parts, (0, tokens), packing.batch, *entry, k.device).contiguous()
            for parts, entry in zip(of_keys, packing.entries, strict=True)
        ]
        returned = sum(length(at) for *_, at in self._returned(self.rank))
        arrivals: list[Arrival] = []
        for viewer, _, at in self._returned(self.rank):
            arrivals += packing.arrivals(viewer, at, returned)
        puts = list(self._returning_puts(computed))
        nbytes = packing.nbytes(returned)
        delivery = rings.inner.deliver("return", nbytes, puts, arrivals, k.device)
        delivery.wait()
        try:
            received = packing.views(delivery.memory, returned)
            return [
                self._sum_gradients(k, own, theirs)
                for own, theirs in zip(computed, received, strict=True)
            ]
        finally:
            delivery.release()

    def _returning_puts(self, computed: Sequence[Tensor]) -> Iterator[Put]:
        """Yield what returns the gradients of gathered tokens to their owners."""
        for owner in range(self.problem.inner):
            returned = list(self._returned(owner)) if owner != self.rank else []
            tokens = sum(length(at) for *_, at in returned)
            for viewer, piece, at in returned:
                if viewer == self.rank:
                    yield from self.return_packing.puts(computed, piece.at, owner, at[0], tokens)

    def _sum_gradients(self, x: Tensor, own: Tensor, received: Tensor) -> Tensor:
        """Return the gradient of x (B, S, G, D) from those of the tokens that this rank gathered
        and of those that other ranks returned. It is new memory.
        """
        parts = [
            (spans, tokens_at(grad, at))
            for grad, found in ((own, self._own_spans), (received, self._returned_spans))
            for spans, at in found
        ]
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return Gradients(x.shape, x.dtype, x.device, into=total, parts=parts).result()

    @functools.cached_property
    def _own_spans(self) -> list[tuple[list[Span], Span]]:
        return _rising((p.span, p.at) for p in self._mine.of(self.rank))

    @functools.cached_property
    def _returned_spans(self) -> list[tuple[list[Span], Span]]:
        return _rising((piece.span, at) for _, piece, at in self._returned(self.rank))


class _Owners:
    """The ranks that own positions.

    neighbours  whether the tokens of each run of a shard are neighbours in the sequence
    """

    def __init__(self, tiling: Tiling):
        self.ranks = range(tiling.layout.size)
        self.runs = sorted(run for rank in self.ranks for run in tiling.shard(rank))
        self.neighbours = all(run.step == 1 for run in self.runs)
        self.starts = [run.start for run in self.runs]

    def pieces(self, positions: Span, at: int) -> Iterator[Piece]:
        """Yield the pieces of neighbouring positions that land from token `at` on."""
        start, stop = positions
        for index in range(bisect.bisect_right(self.starts, start) - 1, len(self.runs)):
            run = self.runs[index]
            if run.start >= stop:
                return
            part = max(start, run.start), min(stop, run.stop)
            yield Piece(
                run.owner, shifted(part, run.span[0] - run.start), shifted(part, at - start)
            )


def gather(tiling: Tiling, owners: _Owners, rank: int, most: int) -> Gathered:
    """Return what a rank gathers. If at most `most` tokens of each rank land then, some land
    several times, so that few kernel calls are needed.
    """
    if owners.neighbours:
        gathered = _gather_tiles(tiling, owners, rank)
        copies = [sum(length(p.span) for p in gathered.of(owner)) for owner in owners.ranks]
        if max(copies) <= most:
            return gathered
    runs = sorted(tiling.seen(rank) + tiling.shard(rank))
    places = [at for _, at in in_turn(run.span for run in runs)]
    pieces = [Piece(run.owner, run.span, at) for run, at in zip(runs, places, strict=True)]
    return Gathered(pieces, tiling.tiles(rank, runs, places))


def _gather_tiles(tiling: Tiling, owners: _Owners, rank: int) -> Gathered:
    """Return the keys of each tile after those of the tile before."""
    tokens = tiling.mask.seq_len
    tiles = tiling.tiles(rank, [(0, 1, rank, (0, tokens))], [(0, tokens)])  # keys by position
    tiles.sort(key=lambda tile: tile[0])  # the tiles of a call rise on both sides
    pieces: list[Piece] = []
    landed: list[TileFields] = []
    for (q, _, low, high), (keys, at) in zip(
        tiles, in_turn(kv for _, kv, *_ in tiles), strict=True
    ):
        landed.append((q, at, low, high))
        for piece in owners.pieces(keys, at[0]):
            before = pieces[-1] if pieces else None
            if before and before.owner == piece.owner and before.span[1] == piece.span[0]:
                whole = (before.span[0], piece.span[1]), (before.at[0], piece.at[1])
                pieces[-1] = Piece(piece.owner, *whole)
            else:
                pieces.append(piece)
    return Gathered(pieces, landed)


def _rising(places: Iterable[tuple[Span, Span]]) -> list[tuple[list[Span], Span]]:
    """Return rising spans of a shard that lie one after the other in memory, and where they lie."""
    found: list[tuple[list[Span], Span]] = []
    for span, at in places:
        if found and found[-1][1][1] == at[0] and found[-1][0][-1][1] <= span[0]:
            spans, before = found[-1]
            found[-1] = [*spans, span], (before[0], at[1])
        else:
            found.append(([span], at))
    return found
