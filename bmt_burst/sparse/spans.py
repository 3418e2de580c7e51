"""Spans of a sequence: gather their tokens from all ranks, and return gradients to the owners.

In a double ring, a rank first exchanges tokens with the ranks at its place of other hosts. Then it
delivers what it has of all hosts to the ranks of its own host. So a token is sent to another host
once. Gradients take the opposite way: the ranks of a host add them up first.

A column is what the ranks at one place of all hosts have of a span, one after the other and flat.

Letters: N tensors, B batch, S tokens of a rank, T tokens of a span, G kv heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..ranks.rings import Rings
from ..sequence.layout import Layout
from ..sequence.span import Span
from ..transport import Arrival, Put

_ALIGNMENT = 256  # bytes


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
        self._known_indices: dict[tuple[int, int, torch.device], Tensor] = {}
        self._cuts = [torch.searchsorted(p, cuts).tolist() for p in self.positions]

    def own_tokens(self, span: int) -> slice:
        """Return the indices of this rank's tokens in a span."""
        return slice(*self._cuts[self.rank][span : span + 2])

    def most_bytes(self, tokens: int, token_bytes: int) -> dict[str, int]:
        """Return the most bytes that a delivery of each lane receives, whatever the spans of up to
        `tokens` tokens are. Those of a token are over N and B.
        """
        held = [len(positions) for positions in self.positions]
        column = max(sum(held[place :: self.inner]) for place in range(self.inner))
        padding = self.inner * _ALIGNMENT
        return {
            "visit": min(tokens, sum(held)) * token_bytes + padding,
            "return": self.inner * min(tokens, column) * token_bytes + padding,
        }

    def gather(self, rings: Rings, tensors: Sequence[Tensor], span: int) -> tuple[Tensor, ...]:
        """Return all tokens of a span in the order of their positions: (B, T, G, D) each.

        tensors  (B, S, G, D) each, of this rank's tokens
        """
        start, stop = self.spans[span]
        if self.size == 1:
            return tuple(x[:, start:stop] for x in tensors)
        mine = torch.stack([x[:, self.own_tokens(span)] for x in tensors])
        of_token = math.prod((*mine.shape[:2], *mine.shape[3:]))
        columns = [sum(self._counts(span, place)) * of_token for place in range(self.inner)]
        shapes = [[_with_tokens(mine, count)] for count in self._counts(span, self.place)]
        parts = rings.outer.all_gather([mine], shapes)
        column = torch.cat([part.flatten() for [part] in parts])
        whole = mine.new_empty(_with_tokens(mine, stop - start))
        with self._deliver(
            rings, "visit", [column] * self.inner, lambda sender, _: columns[sender]
        ) as received:
            for place, flat in enumerate(received):
                counts = self._counts(span, place)
                pieces = flat.split([count * of_token for count in counts])
                for host, (count, piece) in enumerate(zip(counts, pieces, strict=True)):
                    indices = self._indices(span, host * self.inner + place, mine.device)
                    whole.index_copy_(2, indices, piece.view(_with_tokens(mine, count)))
        return tuple(whole)

    def give_back(
        self, rings: Rings, grads: Sequence[Tensor], span: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return the sums over the ranks of the gradients of this rank's tokens in a span: (B, S',
        G, D) each, in the dtype of `grads`.

        grads  (B, T, G, D) each, of all tokens of the span
        dtype  in which they are sent
        """
        if self.size == 1:
            return tuple(grads)
        stacked = torch.stack([grad.to(dtype) for grad in grads])
        columns = []
        for place in range(self.inner):
            ranks = range(place, self.size, self.inner)
            indices = [self._indices(span, rank, stacked.device) for rank in ranks]
            columns.append(torch.cat([stacked.index_select(2, i).flatten() for i in indices]))
        with self._deliver(
            rings, "return", columns, lambda _, receiver: columns[receiver].numel()
        ) as received:
            total = received[0].to(grads[0].dtype, copy=True)
            for part in received[1:]:
                total += part
        shapes = [_with_tokens(stacked, count) for count in self._counts(span, self.place)]
        parts = [
            x.view(shape)
            for x, shape in zip(total.split([s.numel() for s in shapes]), shapes, strict=True)
        ]
        return tuple(_sum_over_hosts(rings, parts, dtype))

    @contextmanager
    def _deliver(
        self,
        rings: Rings,
        lane: str,
        outgoing: Sequence[Tensor],
        count: Callable[[int, int], int],
    ) -> Iterator[list[Tensor]]:
        """Exchange a flat tensor for each place of the host. Yield those for this rank, by place,
        which may be read until the context ends.

        count  the number of entries, by sender and receiver
        """
        if self.inner == 1:
            yield list(outgoing)
            return
        entry, dtype = outgoing[0].element_size(), outgoing[0].dtype

        def offset(sender: int, receiver: int) -> int:
            before = (count(place, receiver) * entry for place in range(sender))
            return sum(-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in before)

        others = [place for place in range(self.inner) if place != self.place]
        puts = [
            Put(outgoing[peer], peer, offset(self.place, peer))
            for peer in others
            if outgoing[peer].numel()
        ]
        arrivals = [
            Arrival(peer, offset(peer, self.place), count(peer, self.place) * entry)
            for peer in others
            if count(peer, self.place)
        ]
        nbytes = offset(self.inner, self.place)
        delivery = rings.inner.deliver(lane, nbytes, puts, arrivals, outgoing[0].device)
        delivery.wait()
        received = list(outgoing)
        for peer, at, size in arrivals:
            received[peer] = delivery.memory[at : at + size].view(dtype)
        for peer in others:
            if not count(peer, self.place):
                received[peer] = outgoing[peer].new_empty(0)
        try:
            yield received
        finally:
            delivery.release()

    def _counts(self, span: int, place: int) -> list[int]:
        """Return the number of tokens of a span that each host has at a place."""
        ranks = range(place, self.size, self.inner)
        return [self._cuts[rank][span + 1] - self._cuts[rank][span] for rank in ranks]

    def _indices(self, span: int, rank: int, device: torch.device) -> Tensor:
        """Return the indices of a rank's tokens in a span, on a device."""
        key = span, rank, device
        if key not in self._known_indices:
            first, last = self._cuts[rank][span : span + 2]
            indices = self.positions[rank][first:last] - self.spans[span][0]
            self._known_indices[key] = indices.to(device)
        return self._known_indices[key]


def _with_tokens(x: Tensor, tokens: int) -> torch.Size:
    """Return the shape of x (N, B, T, G, D) with another number of tokens."""
    return torch.Size((*x.shape[:2], tokens, *x.shape[3:]))


def _sum_over_hosts(rings: Rings, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the sum of what all hosts have for this rank, in the dtype of `parts`: one for each
    host, which are sent in `dtype`. Hosts are added in their order.
    """
    outer, mine = rings.outer, parts[rings.outer.rank]
    if outer.size == 1:
        return mine
    sent = [part.to(dtype) for part in parts]
    received = [sent[outer.rank].new_empty(mine.shape) for _ in parts]
    received[outer.rank] = sent[outer.rank]
    others = [host for host in range(outer.size) if host != outer.rank]
    outer.exchange(
        [(sent[host], host) for host in others if sent[host].numel()],
        [(received[host], host) for host in others if mine.numel()],
    ).wait()
    total = torch.zeros_like(mine)
    for part in received:
        total += part
    return total
