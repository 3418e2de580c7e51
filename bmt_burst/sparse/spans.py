"""Spans of a sequence: gather their tokens from all ranks, and return gradients to the owners.

In a double ring, a rank first exchanges tokens with the ranks at its place of other hosts. Then it
delivers the tokens of all hosts to the ranks of its own host. So each token is sent to another host
once. Gradients take the opposite way: the ranks of a host add them up first.

A column holds the tokens of a span that the ranks at one place of all hosts own, one after the
other and flat.

Letters: N tensors, B batch, S tokens of a rank, T tokens of a span, G kv heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..ranks.rings import Rings, sum_over
from ..sequence.layout import Layout
from ..sequence.span import Span
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
        self._known_indices: dict[tuple[int, int, torch.device], Tensor] = {}
        self._cuts = [torch.searchsorted(p, cuts).tolist() for p in self.positions]

    def own_tokens(self, span: int) -> slice:
        """Return the indices of this rank's tokens in a span."""
        return slice(*self._cuts[self.rank][span : span + 2])

    def most_bytes(self, tokens: int, token_bytes: int) -> dict[str, int]:
        """Return the most bytes that a delivery of each lane receives, for any span of up to
        `tokens` tokens. `token_bytes` are those of a token in all N tensors and B rows.
        """
        held = [len(positions) for positions in self.positions]
        column = max(sum(held[place :: self.inner]) for place in range(self.inner))
        return {
            "visit": min(tokens, sum(held)) * token_bytes,
            "return": self.inner * min(tokens, column) * token_bytes,
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
        sizes = [[n * of_token for n in self._counts(span, p)] for p in range(self.inner)]
        shapes = [_with_tokens(mine, count) for count in self._counts(span, self.place)]
        parts = rings.outer.all_to_all([mine] * rings.outer.size, shapes)
        column = torch.cat([part.flatten() for part in parts])
        whole = mine.new_empty(_with_tokens(mine, stop - start))
        counts = [[sum(of_hosts)] * self.inner for of_hosts in sizes]
        with _deliver(rings.inner, "visit", [column] * self.inner, counts) as received:
            for place, (flat, of_hosts) in enumerate(zip(received, sizes, strict=True)):
                for host, piece in enumerate(flat.split(of_hosts)):
                    indices = self._indices(span, host * self.inner + place, mine.device)
                    tokens = piece.view(_with_tokens(mine, len(indices)))
                    whole.index_copy_(2, indices, tokens)
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
        counts = [[column.numel() for column in columns]] * self.inner
        with _deliver(rings.inner, "return", columns, counts) as received:
            total = received[0].to(grads[0].dtype, copy=True)
            for part in received[1:]:
                total += part
        shapes = [_with_tokens(stacked, count) for count in self._counts(span, self.place)]
        of_hosts = total.split([shape.numel() for shape in shapes])
        mine = of_hosts[0]
        if rings.outer.size > 1:
            mine = sum_over(rings.outer, [part.to(dtype) for part in of_hosts])
        return tuple(mine.view(shapes[rings.outer.rank]))

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


@contextmanager
def _deliver(
    ring: Transport, lane: str, outgoing: Sequence[Tensor], counts: Sequence[Sequence[int]]
) -> Iterator[list[Tensor]]:
    """Send a flat tensor to each rank of a ring. Yield the received ones, by sender. They may be
    read until the context ends.

    counts  the number of entries, by sender and receiver
    """
    mine, entry = ring.rank, outgoing[0].element_size()
    if ring.size == 1:
        yield list(outgoing)
        return
    # A receiver's memory has no place for its own tensor, which is used where it is.
    sent = [[n * (a != b) for b, n in enumerate(row)] for a, row in enumerate(counts)]
    received = [row[mine] for row in sent]
    puts = [
        Put(outgoing[peer], peer, entry * sum(row[peer] for row in sent[:mine]))
        for peer, count in enumerate(sent[mine])
        if count
    ]
    arrivals = [
        Arrival(peer, entry * sum(received[:peer]), entry * count)
        for peer, count in enumerate(received)
        if count
    ]
    nbytes = entry * sum(received)
    delivery = ring.deliver(lane, nbytes, puts, arrivals, outgoing[0].device)
    delivery.wait()
    found = list(delivery.memory.view(outgoing[0].dtype).split(received))
    found[mine] = outgoing[mine]
    try:
        yield found
    finally:
        delivery.release()


def _with_tokens(x: Tensor, tokens: int) -> torch.Size:
    """Return the shape of x (N, B, T, G, D) with another number of tokens."""
    return torch.Size((*x.shape[:2], tokens, *x.shape[3:]))
