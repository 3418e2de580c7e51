"""Ulysses: each rank computes some heads of the tokens of all ranks (DeepSpeed-Ulysses, arXiv
2309.14509).

    forward     each rank sends q, k, v to the ranks of their heads; these return out and lse to the
                ranks of their tokens
    backward    each rank sends q, k, v, dout, and lse and delta (or out); these return dq, dk, dv

Rank r of n computes query heads H r // n to H (r + 1) // n - 1. With fewer heads than ranks, some
ranks have none. A kv head is sent to every rank that has one of its query heads, and its owner adds
up the gradients from all of them. `print(plan)` shows which rank gets which heads.

"usp" is Ulysses around the ring (USP, arXiv 2405.07719). The ranks of each host share the heads in
this way, so each has some heads of its host's tokens. The attention of these to the tokens of other
hosts is a ring of the ranks at the same place of all hosts. With one host that ring is one rank,
which computes the whole mask: this is "ulysses".

Letters: B batch, S tokens of a rank, N tokens of its host, H query heads, G kv heads, h and g those
of a rank, D head size.
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

from ...base.dtypes import accumulator_dtype
from ...kernels.packed import current_stream, send_to_device
from ...merging.merge import Gradients, split_lse_delta, stack_lse_delta
from ...ranks.rings import Rings
from ...sequence.layout import Layout
from ...sequence.span import Span, length
from ...transport import ALONE, Arrival, Put, Transport
from ...transport.packing import Packing
from .. import Plan, Problem, Saved, Strategy
from ..compute import ALL, Keys, QueryGradients
from ..ring import RingPlan

_MOST_RUNS = 1 << 12  # more runs of positions in the tokens of a host make planning slow


class Ulysses(Strategy):
    """Heads are shared by all ranks."""

    name = "ulysses"

    def refuses(self, problem: Problem) -> str | None:
        if problem.outer > 1:
            sizes = f"{problem.outer} x {problem.inner}"
            return f"expected a single group, got a double_group of {sizes}"
        return None

    def plan(self, problem: Problem, rank: int) -> UlyssesPlan:
        return UlyssesPlan(problem, rank)


class USP(Ulysses):
    """Heads are shared by the ranks of a host. Hosts form rings."""

    name = "usp"

    def refuses(self, problem: Problem) -> str | None:
        layout, is_grid = problem.layout, problem.inner > 1 and problem.outer > 1
        runs = sum(len(r) for r in layout.shards[0] if r.step > 1) if is_grid else 0
        if runs > _MOST_RUNS:
            return (
                f"expected at most {_MOST_RUNS} runs of positions on a host, got {runs} of a "
                f"{layout.name} layout: choose another layout"
            )
        return None


class HostLayout(Layout):
    """The layout of tokens on hosts of `inner` ranks each. `layout` is that of the ranks.

    A host has its tokens in rising order.
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
        """Return where the tokens of a rank lie among those of its host: (S,) int64."""
        positions = self.layout.positions(rank)
        if self.size == 1:
            return positions
        return torch.searchsorted(self.positions(rank // self.inner), positions)


class Heads(NamedTuple):
    """The query heads that a rank computes, and the kv heads that they attend to."""

    q: Span
    kv: Span

    @staticmethod
    def of_rank(rank: int, size: int, heads: int, kv_heads: int) -> Heads:
        """Return the heads of a rank of `size` ranks."""
        q = heads * rank // size, heads * (rank + 1) // size
        return Heads(q, _kv_heads(*q, heads // kv_heads))

    def split(self, ratio: int) -> list[tuple[slice, slice]]:
        """Split the query heads so that kernels take each part with its kv heads.

        There are up to three parts: some of the `ratio` query heads of one kv head, whole kv heads,
        and some of one again. Heads count from the rank's first ones.
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
    """A tensor (B, S, heads, *shape) of `dtype`. Its heads are number `kind` of `Heads`."""

    kind: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Move:
    """An all-to-all: every rank sends to every other rank some tokens and some heads of tensors.

    lane      "visit": from the rank of the tokens to that of the heads. "return": the other way.
    packings  how the tensors lie in memory, by the rank of the heads
    tokens    the number of tokens, by their rank
    """

    rank: int
    lane: str
    tensors: Sequence[HeadTensor]
    packings: Sequence[Packing]
    tokens: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that a rank receives into: a slot of the same size for each sender,
        on all ranks.
        """
        return (len(self.tokens) - 1) * self._slot_bytes

    @property
    def leaving_bytes(self) -> int:
        return sum(nbytes for *_, nbytes in self._messages(leaving=True))

    @contextmanager
    def exchange(
        self, transport: Transport, own: Sequence[Sequence[Tensor]]
    ) -> Iterator[list[Sequence[Tensor]]]:
        """Send tensors own[r] to each rank r. Yield those from each rank, own[rank] among them.

        They are valid in the context.
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
        """Yield (peer, tensor, batch row, byte offset, bytes) of each message that this rank sends
        or receives, but no empty ones.
        """
        for peer in self._others:
            packing, tokens, start = (
                self._place(self.rank, peer) if leaving else self._place(peer, self.rank)
            )
            for index, row, offset, nbytes in packing.messages(tokens, (0, tokens)):
                if nbytes:
                    yield peer, index, row, start + offset, nbytes

    def _place(self, source: int, target: int) -> tuple[Packing, int, int]:
        """Return how tensors from `source` lie at `target`, for how many tokens, and from which
        byte on.
        """
        heads, tokens = (target, source) if self.lane == "visit" else (source, target)
        return (
            self.packings[heads],
            self.tokens[tokens],
            ((target - source) % len(self.tokens) - 1) * self._slot_bytes,
        )


class HeadRing(NamedTuple):
    """Some query heads of a rank with their kv heads, counted from its first ones, and the ring
    that computes them.
    """

    q: slice
    kv: slice
    ring: RingPlan


class UlyssesPlan(Plan):
    """The part of one rank: two exchanges in each direction, and between them the rings of its
    heads.
    """

    def __init__(self, problem: Problem, rank: int):
        self.problem, sizes, inner = problem, problem.sizes, problem.inner
        self.host, self.place = divmod(rank, inner)
        self.ranks = range(self.host * inner, (self.host + 1) * inner)
        self.hosts = HostLayout(problem.layout, inner)
        self.heads = [
            Heads.of_rank(place, inner, sizes.heads, sizes.kv_heads) for place in range(inner)
        ]
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
        """Plan the ring between hosts for some heads."""
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
        self, rings: Rings, dout: Tensor, saved: Saved
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse, table, row_lse = saved
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
            return torch.cat(dq, 2), self._sum_shares(dk, k), self._sum_shares(dv, v), dtable

    def __str__(self) -> str:
        """Show which rank gets which heads, and how many bytes this rank sends."""
        layout, of_host = self.problem.layout, self.hosts.length(self.host)
        rank, count = self.ranks[self.place], len(self.head_rings)
        lines = [f"rank {rank} of {layout.size}: {of_host} tokens, {count} head rings"]
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
        """Return a view of the table (R, H) of a bias: some of this rank's heads."""
        return None if table is None else table[:, slice(*self.heads[self.place].q)][:, at]

    def _row_lse(self, flat: Tensor | None, q: Tensor) -> Sequence[Tensor | None]:
        """Return the row_lse of each ring's forward."""
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

    def _sum_shares(self, shares: Sequence[Tensor], x: Tensor) -> Tensor:
        """Add up the gradient of x (B, S, G, D) from each rank's share (B, S, g, D)."""
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
        """Exchange tensors (B, S, H or G, ...) of a host's ranks: return this rank's heads of all
        of them, (B, N, h or g, ...).
        """
        device = tensors[0].device
        own = [
            [x[:, :, slice(*heads[row.kind])] for x, row in zip(tensors, move.tensors, strict=True)]
            for heads in self.heads
        ]
        whole = move.packings[self.place].empty(self.hosts.length(self.host), device)
        with move.exchange(rings.inner, own) as parts:
            for places, part in zip(self._places(device), parts, strict=True):
                for x, y in zip(whole, part, strict=True):
                    x.index_copy_(1, places, y)
        return whole

    def _to_tokens(
        self, rings: Rings, move: Move, tensors: Sequence[Tensor]
    ) -> AbstractContextManager[list[Sequence[Tensor]]]:
        """Exchange tensors (B, N, h or g, ...) of a host's ranks: yield this rank's tokens from
        each, (B, S, h or g, ...), as `Move.exchange` does.
        """
        places = self._places(tensors[0].device)
        return move.exchange(
            rings.inner, [[x.index_select(1, at) for x in tensors] for at in places]
        )

    def _places(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return where the tokens of each rank lie among those of the host: (S,) int64."""
        return _places(
            self.problem.layout, self.problem.inner, self.host, device, current_stream(device)
        )


def _join_heads(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Concatenate parts (B, N, heads, ...). Without parts return `like`, which has no heads."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2) if parts else like


def _between_hosts(rings: Rings) -> Rings:
    """Return the ring of the ranks at this rank's place of all hosts."""
    return Rings(rings.outer, ALONE)


@functools.lru_cache(maxsize=4)  # large on GPUs where every step has a layout of its own
def _places(
    layout: Layout, inner: int, host: int, device: torch.device, stream: torch.cuda.Stream | None
) -> tuple[Tensor, ...]:
    """Return where the tokens of a host's ranks lie among those of the host: (S,) int64 each, for
    work on `stream`. The CPU does not wait for the GPU.
    """
    hosts = HostLayout(layout, inner)
    parts = [hosts.places(rank) for rank in range(host * inner, (host + 1) * inner)]
    return tuple(
        torch.split(send_to_device(torch.cat(parts), device), [len(part) for part in parts])
    )
