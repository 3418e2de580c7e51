"""Ulysses: every rank computes some heads of the tokens of all ranks (DeepSpeed-Ulysses, arXiv
2309.14509).

    forward     q, k, v go to the ranks of their heads; out and lse come back to the ranks of their
                tokens
    backward    q, dout, lse, delta (or out), k, v go there; dq, dk, dv come back

Rank r of n computes query heads H r // n to H (r + 1) // n - 1; with fewer heads than ranks that
may be none. A kv head goes to every rank with a query head of it, and its gradients, one from each
of these, add up at home. `print(plan)` shows who gets what.

"usp" is Ulysses around the ring (USP, arXiv 2405.07719): the ranks of each host share heads so, and
then each has some heads of its host's tokens, whose attention to those of other hosts is a ring of
the ranks at the same place. With one host that ring is a single rank, which computes the whole
mask: this is "ulysses".

Letters: B batch, S tokens of a rank, N of its host, H query heads, G kv heads, h and g those of a
rank, D head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..kernels.packed import current_stream, send_to_device
from ..merging.merge import Gradients, split_lse_delta, stack_lse_delta
from ..ranks.rings import Rings
from ..sequence.layout import Layout
from ..sequence.span import Span, length
from ..transport import ALONE, Arrival, Put, Transport
from ..transport.packing import Packing
from . import Plan, Problem, Strategy
from .compute import ALL, Keys, QueryGradients
from .ring import RingPlan

_MOST_RUNS = 1 << 12  # of positions that the tokens of a host may be, for planning to be quick


class Ulysses(Strategy):
    name = "ulysses"

    def refuses(self, problem: Problem) -> str | None:
        if problem.outer > 1:
            return f"it takes a single group of ranks, not a double_group of {problem.outer} x {problem.inner}"
        return None

    def plan(self, problem: Problem, rank: int) -> UlyssesPlan:
        return UlyssesPlan(problem, rank)


class USP(Ulysses):
    name = "usp"

    def refuses(self, problem: Problem) -> str | None:
        layout, is_grid = problem.layout, problem.inner > 1 and problem.outer > 1
        runs = sum(len(r) for r in layout.shards[0] if r.step > 1) if is_grid else 0
        if runs > _MOST_RUNS:
            return (
                f"in a {layout.name} layout the tokens of a host are {runs} runs of positions, but it takes at most "
                f"{_MOST_RUNS}: give it another layout"
            )
        return None


class HostLayout(Layout):
    """How tokens lie on hosts, if they lie on ranks as in `layout`, of which `inner` are a host: in
    rising order.
    """

    name = "of hosts"

    def __init__(self, layout: Layout, inner: int):
        super().__init__(layout.seq_len, layout.size // inner)
        self.layout, self.inner = layout, inner

    def ranges(self, rank: int) -> Sequence[range]:
        if self.size == 1:
            return [range(self.seq_len)]
        shards = self.layout.shards[rank * self.inner : (rank + 1) * self.inner]
        ranges = sorted(itertools.chain.from_iterable(shards), key=lambda r: r.start)
        if self.inner == 1:
            return ranges
        if any(r.step > 1 for r in ranges):
            ranges = [range(i, i + 1) for i in sorted(itertools.chain.from_iterable(ranges))]
        found: list[range] = []
        for r in ranges:
            if found and found[-1].stop == r.start:
                found[-1] = range(found[-1].start, r.stop)
            else:
                found.append(r)
        return found

    def places(self, rank: int) -> Tensor:
        """Where the tokens of a rank lie among those of its host: (S,) int64."""
        positions = self.layout.positions(rank)
        return (
            positions
            if self.size == 1
            else torch.searchsorted(self.positions(rank // self.inner), positions)
        )


class Heads(NamedTuple):
    """The query heads that a rank computes, and the kv heads that they attend to."""

    q: Span
    kv: Span

    @staticmethod
    def of(rank: int, size: int, heads: int, kv_heads: int) -> Heads:
        q = heads * rank // size, heads * (rank + 1) // size
        return Heads(q, _kv_heads(*q, heads // kv_heads))

    def split(self, ratio: int) -> list[tuple[slice, slice]]:
        """The query heads in parts with their kv heads, both counted from the rank's first ones.

        Up to three, as kernels take no others: a part of one kv head's `ratio` query heads, all of
            some, a part again.
        """
        start, stop = self.q
        ends = {
            start,
            min(-(-start // ratio) * ratio, stop),
            max(stop // ratio * ratio, start),
            stop,
        }
        parts = [((a, b), _kv_heads(a, b, ratio)) for a, b in itertools.pairwise(sorted(ends))]
        return [
            (slice(a - start, b - start), slice(c - self.kv[0], d - self.kv[0]))
            for (a, b), (c, d) in parts
        ]


def _kv_heads(start: int, stop: int, ratio: int) -> Span:
    return (start // ratio, -(-stop // ratio)) if start < stop else (0, 0)


class HeadTensor(NamedTuple):
    """What a tensor (B, S, heads, *shape) of `dtype` has of a token; its heads are number `kind` of
    `Heads`.
    """

    kind: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Move:
    """Tensors that every rank sends to every other one: some tokens and some heads of them.

    lane      "visit": from the rank of the tokens to that of the heads; "return": the other way
              round
    packings  how they lie in memory, by the rank of the heads
    tokens    how many there are, by the rank of the tokens
    """

    rank: int
    lane: str
    tensors: Sequence[HeadTensor]
    packings: Sequence[Packing]
    tokens: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a rank receives into: the same on all, with as much for each sender."""
        return (len(self.tokens) - 1) * self._slot_bytes

    @property
    def leaving_bytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._messages(leaving=True))

    @contextmanager
    def moved(
        self, transport: Transport, own: Sequence[Sequence[Tensor]]
    ) -> Iterator[list[Sequence[Tensor]]]:
        """Sends tensors own[r] to each rank r; yields those from each, own[rank] among them, good
        in the context.
        """
        puts = [
            Put(own[to][i][row].contiguous(), to, at)
            for to, i, row, at, _ in self._messages(leaving=True)
        ]
        arrivals = [
            Arrival(peer, at, nbytes) for peer, _, _, at, nbytes in self._messages(leaving=False)
        ]
        delivery = transport.deliver(
            self.lane, self.nbytes, puts, arrivals, own[self.rank][0].device
        )
        try:
            delivery.wait()
            parts = list(own)
            for peer in self._others:
                packing, tokens, start = self._place(peer, self.rank)
                parts[peer] = packing.views(delivery.memory[start:], tokens)
            yield parts
        finally:
            delivery.release()

    @functools.cached_property
    def _slot_bytes(self) -> int:
        return max(packing.nbytes(max(self.tokens)) for packing in self.packings)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.tokens)) if peer != self.rank]

    def _messages(self, leaving: bool) -> Iterator[tuple[int, int, int, int, int]]:
        """(peer, tensor, batch row, byte offset, bytes) of what this rank sends or receives; no
        empty ones.
        """
        for peer in self._others:
            packing, tokens, start = (
                self._place(self.rank, peer) if leaving else self._place(peer, self.rank)
            )
            for index, row, offset, nbytes in packing.messages(tokens, (0, tokens)):
                if nbytes:
                    yield peer, index, row, start + offset, nbytes

    def _place(self, source: int, target: int) -> tuple[Packing, int, int]:
        """How a rank's tensors lie at another one, of how many tokens, and from which byte on."""
        heads, tokens = (target, source) if self.lane == "visit" else (source, target)
        return (
            self.packings[heads],
            self.tokens[tokens],
            ((target - source) % len(self.tokens) - 1) * self._slot_bytes,
        )


class HeadRing(NamedTuple):
    """Some of a rank's query heads and their kv heads, counted from its first ones, and the ring
    that computes them.
    """

    q: slice
    kv: slice
    ring: RingPlan


class UlyssesPlan(Plan):
    """A rank's part in a problem: four moves and, between each two, the rings of its heads."""

    def __init__(self, problem: Problem, rank: int):
        self.problem, sizes, inner = problem, problem.sizes, problem.inner
        self.host, self.place = divmod(rank, inner)
        self.ranks = range(self.host * inner, (self.host + 1) * inner)
        self.hosts = HostLayout(problem.layout, inner)
        self.heads = [Heads.of(place, inner, sizes.heads, sizes.kv_heads) for place in range(inner)]
        parts = self.heads[self.place].split(sizes.heads // sizes.kv_heads)
        self.head_rings = [HeadRing(at, kv_at, self._ring(at, kv_at)) for at, kv_at in parts]
        self.sends_delta = problem.takes_delta
        head, wide = (sizes.head_size,), accumulator_dtype(sizes.dtype)
        q, kv = HeadTensor(0, head, sizes.dtype), HeadTensor(1, head, sizes.dtype)
        softmax = [HeadTensor(0, (2,), wide)] if self.sends_delta else [HeadTensor(0, (), wide), q]
        self.inputs = self._move("visit", q, kv, kv)
        self.results = self._move("return", q, HeadTensor(0, (), wide))
        self.backward_inputs = self._move("visit", q, kv, kv, q, *softmax)
        self.backward_results = self._move("return", q, kv, kv)

    def _ring(self, at: slice, kv_at: slice) -> RingPlan:
        """The ring between hosts, of some heads."""
        sizes = replace(
            self.problem.sizes, heads=at.stop - at.start, kv_heads=kv_at.stop - kv_at.start
        )
        ring = replace(
            self.problem, layout=self.hosts, inner=self.problem.outer, outer=1, sizes=sizes
        )
        return RingPlan(ring, self.host)

    def _move(self, lane: str, *tensors: HeadTensor) -> Move:
        shapes = [
            tuple(((length(heads[x.kind]), *x.shape), x.dtype) for x in tensors)
            for heads in self.heads
        ]
        packings = [Packing(self.problem.sizes.batch, theirs) for theirs in shapes]
        return Move(
            self.place,
            lane,
            tensors,
            packings,
            [self.problem.layout.length(rank) for rank in self.ranks],
        )

    def reserve(self, rings: Rings, device: torch.device, with_backward: bool) -> None:
        there = [self.inputs] + [self.backward_inputs] * with_backward
        back = [self.results] + [self.backward_results] * with_backward
        lanes = {"visit": there, "return": back}
        rings.reserve(
            {lane: max(move.nbytes for move in moves) for lane, moves in lanes.items()}, device
        )
        for each in self.head_rings:
            each.ring.reserve(_between_hosts(rings), device, with_backward)

    def forward(
        self, rings: Rings, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = self._to_heads(rings, self.inputs, [q, k, v])
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        row_lses: list[Tensor] = []
        for at, kv_at, ring in self.head_rings:
            inputs = q[:, :, at], k[:, :, kv_at], v[:, :, kv_at]
            out, lse, row_lse = ring.forward(
                _between_hosts(rings), *inputs, self._own_heads(table, at)
            )
            outs.append(out)
            lses.append(lse.transpose(1, 2))
            if row_lse is not None:
                row_lses.append(row_lse)
        no_lse = q[:, :, :0, 0].to(accumulator_dtype(q.dtype))
        with self._to_tokens(
            rings, self.results, [_join_heads(outs, q), _join_heads(lses, no_lse)]
        ) as parts:
            out, lse = (torch.cat(same, 2) for same in zip(*parts, strict=True))
        flat = (
            None
            if table is None
            else torch.cat([table.new_empty(0), *(x.flatten() for x in row_lses)])
        )
        return out, lse.transpose(1, 2).contiguous(), flat

    def backward(
        self,
        rings: Rings,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        table: Tensor | None = None,
        row_lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        softmax = (
            [stack_lse_delta(out, dout, lse)] if self.sends_delta else [lse.transpose(1, 2), out]
        )
        inputs = [q, k, v, dout, *softmax]
        q, all_k, all_v, *rest = self._to_heads(rings, self.backward_inputs, inputs)
        queries = self._make_queries(q, *rest)
        grads: list[tuple[Tensor, ...]] = []
        dtable = None if table is None else torch.zeros_like(table)
        for (at, kv_at, ring), its_row_lse in zip(
            self.head_rings, self._row_lse(row_lse, q), strict=True
        ):
            sides = queries.part(ALL, at), Keys(all_k[:, :, kv_at], all_v[:, :, kv_at])
            *found, share = ring.differentiate(
                _between_hosts(rings), *sides, self._own_heads(table, at), its_row_lse
            )
            grads.append(tuple(x for x in found if x is not None))
            own = self._own_heads(dtable, at)
            if own is not None and share is not None:
                own.copy_(share)
        results = [
            _join_heads([found[i] for found in grads], x) for i, x in enumerate((q, all_k, all_v))
        ]
        with self._to_tokens(rings, self.backward_results, results) as parts:
            dq, dk, dv = zip(*parts, strict=True)
            return torch.cat(dq, 2), self._sum(dk, k), self._sum(dv, v), dtable

    def __str__(self) -> str:
        """Who gets which heads, and how many bytes this rank sends."""
        layout, of_host = self.problem.layout, self.hosts.length(self.host)
        lines = [
            f"rank {self.ranks[self.place]} of {layout.size}: {of_host} tokens, {len(self.head_rings)} head rings"
        ]
        for rank, (q, kv) in zip(self.ranks, self.heads, strict=True):
            some = (
                f"query heads {q[0]} to {q[1] - 1}, kv heads {kv[0]} to {kv[1] - 1}"
                if length(q)
                else "no heads"
            )
            lines.append(f"  rank {rank} computes {some}")
        moves = {
            "inputs": self.inputs,
            "results": self.results,
            "backward inputs": self.backward_inputs,
            "backward results": self.backward_results,
        }
        lines += [f"  {move.leaving_bytes:,} bytes leave: {name}" for name, move in moves.items()]
        if self.hosts.size > 1:
            for number, each in enumerate(self.head_rings):
                lines += [f"between hosts, of head ring {number}:", *str(each.ring).splitlines()]
        return "\n".join(lines)

    def _make_queries(self, q: Tensor, dout: Tensor, *softmax: Tensor) -> QueryGradients:
        if self.sends_delta:
            lse, delta = split_lse_delta(softmax[0])
            return QueryGradients(q, dout, lse, delta=delta)
        lse, out = softmax
        return QueryGradients(q, dout, lse.transpose(1, 2), out)

    def _own_heads(self, table: Tensor | None, at: slice) -> Tensor | None:
        """Some of the heads that this rank computes of a bias's table (R, H): a view."""
        return None if table is None else table[:, slice(*self.heads[self.place].q)][:, at]

    def _row_lse(self, flat: Tensor | None, q: Tensor) -> Sequence[Tensor | None]:
        """What the rings' forwards left for their backwards."""
        if flat is None:
            return [None] * len(self.head_rings)
        shapes = [
            (len(c.ring.problem.rows), len(q), c.ring.problem.sizes.heads, q.shape[1])
            for c in self.head_rings
        ]
        return [
            x.view(shape)
            for x, shape in zip(
                torch.split(flat, [math.prod(s) for s in shapes]), shapes, strict=True
            )
        ]

    def _sum(self, shares: Sequence[Tensor], x: Tensor) -> Tensor:
        """The gradient of x (B, S, G, D), of which each rank's share is (B, S, g, D)."""
        grad = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for a, b in itertools.pairwise(sorted({end for heads in self.heads for end in heads.kv})):
            into = grad[:, :, a:b]
            parts = [
                ([(0, x.shape[1])], share[:, :, a - first : b - first])
                for (_, (first, last)), share in zip(self.heads, shares, strict=True)
                if first <= a and b <= last
            ]
            Gradients(into.shape, into.dtype, into.device, into=into, parts=parts).result()
        return grad

    def _to_heads(self, rings: Rings, move: Move, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of tensors (B, S, H or G, ...) of a host's ranks the heads of this one: (B, N, h or g,
        ...).
        """
        device = tensors[0].device
        own = [
            [x[:, :, slice(*heads[row.kind])] for x, row in zip(tensors, move.tensors, strict=True)]
            for heads in self.heads
        ]
        whole = move.packings[self.place].empty(self.hosts.length(self.host), device)
        with move.moved(rings.inner, own) as parts:
            for places, part in zip(self._places(device), parts, strict=True):
                for x, y in zip(whole, part, strict=True):
                    x.index_copy_(1, places, y)
        return whole

    def _to_tokens(
        self, rings: Rings, move: Move, tensors: Sequence[Tensor]
    ) -> AbstractContextManager[list[Sequence[Tensor]]]:
        """Of tensors (B, N, h or g, ...) of each rank the tokens of this one: (B, S, h or g, ...),
        as `Move.moved`.
        """
        places = self._places(tensors[0].device)
        return move.moved(rings.inner, [[x.index_select(1, at) for x in tensors] for at in places])

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Where the tokens of each of the host's ranks lie among all of them, (S,) int64."""
        return _places(
            self.problem.layout, self.problem.inner, self.host, device, current_stream(device)
        )


def _join_heads(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Parts (B, N, heads, ...) as one; without any what is `like` them, of no heads."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2) if parts else like


def _between_hosts(rings: Rings) -> Rings:
    """The ring of the ranks at one place of all hosts."""
    return Rings(rings.outer, ALONE)


@functools.lru_cache(maxsize=4)  # large on GPUs where every step has a layout of its own
def _places(
    layout: Layout, inner: int, host: int, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[Tensor, ...]:
    """Where the tokens of a host's ranks lie among these, (S,) int64, for work on `stream`. The
    host does not wait.
    """
    hosts = HostLayout(layout, inner)
    parts = [hosts.places(rank) for rank in range(host * inner, (host + 1) * inner)]
    return tuple(
        torch.split(send_to_device(torch.cat(parts), device), [len(part) for part in parts])
    )
