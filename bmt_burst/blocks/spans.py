"""Spans of a sequence: gather their tokens from all ranks, and return gradients to the owners.

In a double ring, a rank first exchanges tokens with the ranks at its place of other hosts. Then it
delivers the tokens of all hosts, a column, to the ranks of its own host. So each token is sent to
another host once. Gradients take the opposite way: the ranks of a host add them up first.

Letters: N tensors, B batch, S tokens of a rank, T tokens of a span, G kv heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..base.dtypes import copy_unit
from ..base.streams import send_to_device
from ..kernels.packed import prepare_once
from ..ranks.rings import Rings, sum_over
from ..sequence.layout import Layout
from ..sequence.span import Span, length
from ..transport import Arrival, Put, Transport


class Spans:
    """The spans of a sequence that is cut over ranks, as `rank` exchanges them.

    spans  rising, without gaps
    inner  the number of ranks of a host
    """

    def __init__(self, layout: Layout, rank: int, inner: int, spans: Sequence[Span]):
        self.rank, self.size, self.inner, self.spans = rank, layout.size, inner, tuple(spans)
        self.place = rank % inner
        self.positions = [layout.positions(r) for r in range(layout.size)]
        cuts = torch.tensor([*(start for start, _ in self.spans), layout.seq_len])
        self.prepared: dict[Any, Any] = {}  # what is kept on devices
        self._cuts = [torch.searchsorted(p, cuts).tolist() for p in self.positions]

    def own_tokens(self, span: int) -> slice:
        """Return the indices of this rank's tokens in a span."""
        return slice(*self._cuts[self.rank][span : span + 2])

    def gather(self, rings: Rings, tensors: Sequence[Tensor], span: int) -> tuple[Tensor, ...]:
        """Return all tokens of a span, (B, T, G, D), of tensors of this rank's, (B, S, G, D)."""
        start, stop = self.spans[span]
        if self.size == 1:
            return tuple(x[:, start:stop] for x in tensors)
        mine = torch.stack([x[:, self.own_tokens(span)] for x in tensors])
        shapes = [_with_tokens(mine, count) for count in self._counts(span, self.place)]
        parts = rings.outer.all_to_all([mine] * rings.outer.size, shapes)
        column = torch.cat(parts, 2) if len(parts) > 1 else mine
        whole = mine.new_empty(_with_tokens(mine, stop - start))
        shapes = [_with_tokens(mine, sum(self._counts(span, p))) for p in range(self.inner)]
        counts = [[shape.numel()] * self.inner for shape in shapes]
        with _deliver(rings.inner, "visit", [column] * self.inner, counts) as received:
            for place, (flat, shape) in enumerate(zip(received, shapes, strict=True)):
                indices = self._indices(span, place, mine.device)
                _rows(whole).index_copy_(2, indices, _rows(flat.view(shape)))
        return tuple(whole)

    @contextmanager
    def returning(
        self, rings: Rings, sums: Sequence[Tensor], span: int, dtype: torch.dtype
    ) -> Iterator[Iterable[Tensor]]:
        """Yield gradients (B, T, G, D) of all tokens of a span, to add to. At the end, those of
        each rank's tokens, from all ranks, are added to its sums.

        sums   (B, S, G, D) each, of this rank's tokens
        dtype  in which gradients are sent
        """
        own = [x[:, self.own_tokens(span)] for x in sums]
        if self.size == 1:
            yield own
            return
        batch, _, *row = sums[0].shape
        grads = sums[0].new_zeros(len(sums), batch, length(self.spans[span]), *row)
        yield grads
        stacked = grads.to(dtype)
        indices = [self._indices(span, place, stacked.device) for place in range(self.inner)]
        columns = [_rows(stacked).index_select(2, at) for at in indices]
        counts = [[column.numel() for column in columns]] * self.inner
        with _deliver(rings.inner, "return", columns, counts) as received:
            first, *others = (part.view(dtype) for part in received)
            column = first.to(grads.dtype, copy=True)
            for part in others:
                column += part
        column = column.view(_with_tokens(grads, columns[self.place].shape[2]))
        if rings.outer.size > 1:
            of_hosts = column.split(self._counts(span, self.place), 2)
            column = sum_over(rings.outer, [part.to(dtype).contiguous() for part in of_hosts])
        for total, part in zip(own, column, strict=True):
            total += part

    def _counts(self, span: int, place: int) -> list[int]:
        """Return the number of tokens of a span that each host has at a place."""
        ranks = range(place, self.size, self.inner)
        return [self._cuts[rank][span + 1] - self._cuts[rank][span] for rank in ranks]

    def _indices(self, span: int, place: int, device: torch.device) -> Tensor:
        """Return the indices of a column's tokens in a span, on a device."""

        def make() -> Tensor:
            ranks = range(place, self.size, self.inner)
            parts = [self.positions[r][slice(*self._cuts[r][span : span + 2])] for r in ranks]
            return send_to_device(torch.cat(parts) - self.spans[span][0], device)

        return prepare_once(self, ("indices", span, place), device, make)


@contextmanager
def _deliver(
    ring: Transport, lane: str, outgoing: Sequence[Tensor], counts: Sequence[Sequence[int]]
) -> Iterator[list[Tensor]]:
    """Send a tensor to each rank of a ring, also to this one. Yield the received ones flat, by
    sender. They may be read until the context ends.

    counts  the number of entries, by sender and receiver
    """
    entry, received = outgoing[0].element_size(), [row[ring.rank] for row in counts]
    before = [sum(row[peer] for row in counts[: ring.rank]) for peer in range(ring.size)]
    puts = [Put(x, peer, entry * before[peer]) for peer, x in enumerate(outgoing) if x.numel()]
    *places, total = itertools.accumulate(received, initial=0)
    arrivals = [
        Arrival(peer, entry * place, entry * count)
        for peer, (place, count) in enumerate(zip(places, received, strict=True))
        if count and peer != ring.rank
    ]
    delivery = ring.deliver(lane, entry * total, puts, arrivals, outgoing[0].device)
    delivery.wait()
    try:
        yield list(delivery.memory.view(outgoing[0].dtype).split(received))
    finally:
        delivery.release()


def _with_tokens(x: Tensor, tokens: int) -> torch.Size:
    """Return the shape of x (N, B, T, G, D) with another number of tokens."""
    return torch.Size((*x.shape[:2], tokens, *x.shape[3:]))


def _rows(x: Tensor) -> Tensor:
    """View x (N, B, T, G, D) as the rows of its tokens, (N, B, T, units)."""
    rows = x.flatten(3)
    return rows.view(copy_unit(rows.dtype, rows.shape[3]))
