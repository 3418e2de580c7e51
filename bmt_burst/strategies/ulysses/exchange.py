"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visits    each rank sends its tokens to the ranks of the heads
Returns   these send what they computed back to the ranks of the tokens

A message is a run of tokens of one tensor, with the heads of the piece. Both ends hold these heads
in one tensor, so its bytes are contiguous. Before the visits each rank packs the heads of each
receiver. The results of a piece are sent as a kernel leaves them, and copied to their heads.

Letters: B batch, S tokens of a rank, N tokens of a host, D head size, h some heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival, Delivery, Put, Transport
from ...transport.packing import Packing
from .heads import Heads
from .tokens import HostTokens


class Field(NamedTuple):
    """A tensor that is exchanged: (B, S, heads, D), or (B, heads, S) for a `head_size` of 0.

    kv  whether its heads are kv heads
    """

    kv: bool
    head_size: int
    dtype: torch.dtype

    def heads(self, heads: Heads) -> Span:
        """Return the heads of this tensor among some heads."""
        return heads.kv if self.kv else heads.q

    def entry(self, heads: Heads) -> tuple[tuple[int, ...], torch.dtype]:
        """Return the shape and dtype of a token's entry for some heads."""
        count = length(self.heads(heads))
        return ((count, self.head_size) if self.head_size else (count,)), self.dtype

    def by_token(self, x: Tensor) -> Tensor:
        """Return the tensor with its tokens before its heads, as it is sent: (B, S, heads, ...).

        The same function undoes it.
        """
        return x if self.head_size else x.transpose(1, 2)


@dataclass(frozen=True)
class Exchange:
    """The exchanges of all pieces, between ranks 0, 1, ... of a host.

    rank    this one
    pieces  the heads of each piece, by rank
    """

    rank: int
    fields: Sequence[Field]
    batch: int
    tokens: HostTokens
    pieces: Sequence[Sequence[Heads]]

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self.pieces[0])

    @property
    def ranks(self) -> range:
        return range(len(self.pieces))

    def packing(self, rank: int, piece: int) -> Packing:
        """Return how the tensors lie in memory with the heads of a rank's piece."""
        heads = self.pieces[rank][piece]
        return Packing(self.batch, tuple(field.entry(heads) for field in self.fields))

    def _runs(self, rank: int) -> Iterator[tuple[Span, Span]]:
        """Yield spans of a rank's tokens, and where they lie among the tokens of the host."""
        return ((span, (at, at + length(span))) for span, at in self.tokens.spans[rank])


class Visits(Exchange):
    """Each rank sends its tokens to the ranks that compute their heads, itself among them."""

    @property
    def nbytes(self) -> int:
        """The most bytes that any rank receives at once."""
        found = itertools.product(self.ranks, range(self.count))
        return max(self.packing(*each).nbytes(self.tokens.total) for each in found)

    def start(
        self, transport: Transport, piece: int, inputs: Sequence[Tensor], device: torch.device
    ) -> Delivery:
        """Send this rank's tokens of a piece. The inputs have all heads."""
        tokens, puts, arrivals = self.tokens.total, list[Put](), list[Arrival]()
        for peer in self.ranks:
            tensors = self._pack(inputs, self.pieces[peer][piece])
            for span, at in self._runs(self.rank):
                puts += self.packing(peer, piece).puts(tensors, span, peer, at[0], tokens)
            if peer != self.rank:
                for _, at in self._runs(peer):
                    arrivals += self.packing(self.rank, piece).arrivals(peer, at, tokens)
        nbytes = self.packing(self.rank, piece).nbytes(tokens)
        return transport.deliver("visit", nbytes, puts, arrivals, device)

    def received(self, piece: int, delivery: Delivery) -> list[Tensor]:
        """Return the fields of this rank's heads, for all tokens of the host in the order of their
        positions. They are valid until the delivery is released.
        """
        packing = self.packing(self.rank, piece)
        views = self.tokens.sort(packing.views(delivery.memory, self.tokens.total))
        pairs = zip(self.fields, views, strict=True)
        return [field.by_token(x).contiguous() for field, x in pairs]

    def _pack(self, inputs: Sequence[Tensor], heads: Heads) -> list[Tensor]:
        """Return some heads of the inputs, each contiguous: (B, S, h, ...)."""
        pairs = zip(self.fields, inputs, strict=True)
        return [
            field.by_token(x)[:, :, slice(*field.heads(heads))].contiguous() for field, x in pairs
        ]


class Returns(Exchange):
    """The ranks of the heads send results to the ranks of the tokens, themselves among them."""

    @property
    def nbytes(self) -> int:
        """The most bytes that any rank receives at once."""
        found = itertools.product(self.ranks, range(self.count))
        return max(self._starts(rank, piece)[-1] for rank, piece in found)

    def start(
        self,
        transport: Transport,
        piece: int,
        parts: Sequence[Sequence[Tensor]],
        device: torch.device,
    ) -> Delivery:
        """Send the results of a piece. The parts have some of its heads each, in their order, and
        all tokens of the host in the order of their positions.
        """
        tensors, counts = self._join(parts), self.tokens.counts
        packing, puts, arrivals = self.packing(self.rank, piece), list[Put](), list[Arrival]()
        for peer in self.ranks:
            start = self._starts(peer, piece)[self.rank]
            for span, at in self._runs(peer):
                puts += packing.puts(tensors, at, peer, span[0], counts[peer], start)
            if peer != self.rank:
                start, count = self._starts(self.rank, piece)[peer], counts[self.rank]
                for span, _ in self._runs(self.rank):
                    arrivals += self.packing(peer, piece).arrivals(peer, span, count, start)
        nbytes = self._starts(self.rank, piece)[-1]
        return transport.deliver("return", nbytes, puts, arrivals, device)

    def received(self, piece: int, delivery: Delivery) -> Iterator[tuple[Heads, Iterable[Tensor]]]:
        """Yield the heads that each rank computed, and the fields of this rank's tokens, tokens
        before heads. They are valid until the delivery is released.
        """
        for peer, start in zip(self.ranks, self._starts(self.rank, piece), strict=False):
            views = self.packing(peer, piece).views(
                delivery.memory[start:], self.tokens.counts[self.rank]
            )
            yield self.pieces[peer][piece], views

    def _join(self, parts: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Return the fields of all parts as they are sent. Without any part there are none."""
        by_field = zip(self.fields, zip(*parts, strict=True), strict=False)
        sent = [[field.by_token(x) for x in same] for field, same in by_field]
        joined = [same[0] if len(same) == 1 else torch.cat(same, 2) for same in sent]
        return [x.contiguous() for x in self.tokens.unsort(joined)]

    def _starts(self, rank: int, piece: int) -> list[int]:
        """Return the first byte of what a rank receives from each rank, and the end."""
        tokens = self.tokens.counts[rank]
        sizes = (self.packing(peer, piece).nbytes(tokens) for peer in self.ranks)
        return list(itertools.accumulate(sizes, initial=0))
