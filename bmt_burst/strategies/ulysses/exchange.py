"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visits    each rank sends its tokens to the ranks of the heads
Returns   these send what they computed back to the ranks of the tokens

Every message lands where it is used, and is read where it was computed. So nothing is packed: a
message is some rows, at equal distances at both ends (see `bmt_burst.transport.Put`).

Letters: B batch, S tokens of a rank or a host, D head size.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival, Delivery, Put, Transport
from .blocks import Block, Field, Index, Part
from .heads import Heads
from .tokens import HostTokens


class Message(NamedTuple):
    """Rows of a field that a rank sends, and their place at the receiver."""

    field: int
    here: Index
    peer: int
    offset: int
    pitch: int


class Manifest(NamedTuple):
    """The messages of this rank in the exchange of a piece. It receives into `nbytes` of memory."""

    nbytes: int
    leaving: Sequence[Message]
    arrivals: Sequence[Arrival]


@dataclass(frozen=True)
class Exchange(ABC):
    """The exchanges of all pieces, between ranks 0, 1, ... of a host.

    rank    this one
    pieces  the heads of each piece, by rank
    """

    rank: int
    fields: Sequence[Field]
    batch: int
    tokens: HostTokens
    pieces: Sequence[Sequence[Heads]]

    lane = ""
    to_itself = False  # whether a rank also sends to itself

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self.pieces[0])

    @property
    def nbytes(self) -> int:
        """The most bytes that any rank receives at once."""
        ranks, pieces = range(len(self.pieces)), range(self.count)
        return max(self._nbytes(rank, piece) for rank in ranks for piece in pieces)

    @property
    def leaving_bytes(self) -> int:
        """The bytes that this rank sends to others."""
        return sum(
            arrival.nbytes * arrival.rows
            for piece in range(self.count)
            for peer in self._others
            for *_, arrival in self._messages(piece, self.rank, peer)
        )

    @functools.cached_property
    def manifests(self) -> list[Manifest]:
        return [self._manifest(piece) for piece in range(self.count)]

    def with_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with contiguous rows: a token's heads, or a head's tokens."""
        return [x if x.is_contiguous() or _has_rows(x) else x.contiguous() for x in tensors]

    def start(
        self, transport: Transport, piece: int, tensors: Sequence[Tensor], device: torch.device
    ) -> Delivery:
        """Start the exchange of a piece. The tensors are those of `with_rows`."""
        manifest = self.manifests[piece]
        puts = [
            Put(tensors[field][at], peer, offset, pitch)
            for field, at, peer, offset, pitch in manifest.leaving
        ]
        return transport.deliver(self.lane, manifest.nbytes, puts, manifest.arrivals, device)

    def _manifest(self, piece: int) -> Manifest:
        leaving = [
            Message(field, index, peer, arrival.offset, arrival.pitch)
            for peer in (*self._others, *[self.rank] * self.to_itself)
            for field, index, arrival in self._messages(piece, self.rank, peer)
        ]
        arrivals = [
            arrival
            for peer in self._others
            for *_, arrival in self._messages(piece, peer, self.rank)
        ]
        return Manifest(self._nbytes(self.rank, piece), leaving, arrivals)

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.pieces)) if peer != self.rank]

    def _rows(self, block: Block, rank: int) -> Iterator[tuple[int, int, Span, Span]]:
        """Yield (field, batch row, span, place) of the tokens of a rank in each field of a block
        that has heads: spans of its shard, and where they lie among the tokens of the host.
        """
        for number, field in enumerate(self.fields):
            for row in range(self.batch if length(field.heads(block.heads)) else 0):
                for span, at in self.tokens.spans[rank]:
                    yield number, row, span, (at, at + length(span))

    @abstractmethod
    def _nbytes(self, rank: int, piece: int) -> int:
        """Return the bytes that a rank receives into."""

    @abstractmethod
    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Index, Arrival]]:
        """Yield the field of each message between two ranks, its index at the source and its place
        at the target. There are no empty ones.
        """


class Visits(Exchange):
    """Every rank sends tokens to the ranks that compute their heads, itself among them."""

    lane = "visit"
    to_itself = True

    def views(self, piece: int, memory: Tensor) -> list[Tensor]:
        """Return the fields of this rank's heads: all tokens of the host, as they lie in
        `memory`.
        """
        return [part.view(memory) for part in self._own_blocks[piece].parts]

    @functools.cached_property
    def _own_blocks(self) -> list[Block]:
        return [self._block(self.rank, piece) for piece in range(self.count)]

    def _nbytes(self, rank: int, piece: int) -> int:
        return self._block(rank, piece).stop

    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Index, Arrival]]:
        block = self._block(target, piece)
        for number, row, span, at in self._rows(block, source):
            arrival = block.arrival(source, number, row, at)
            field = self.fields[number]
            yield number, field.at(row, span, field.heads(block.heads)), arrival

    def _block(self, rank: int, piece: int) -> Block:
        return Block(self.fields, self.batch, self.tokens.total, self.pieces[rank][piece])


class Returns(Exchange):
    """Every rank sends its results back to the ranks of their tokens."""

    lane = "return"

    def unload(
        self,
        delivery: Delivery,
        piece: int,
        computed: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        """Copy what was received, and what this rank `computed` for itself, to the results. These
        have this rank's tokens, all query heads, and `kv_columns`.
        """
        received, own = self._copies[piece]
        delivery.unload(
            [(results[field][into], part.view(delivery.memory)) for field, part, into in received]
            + [(results[field][into], computed[field][index]) for field, index, into in own]
        )

    @functools.cached_property
    def kv_columns(self) -> list[list[Span]]:
        """The columns of a result that each piece's kv heads fill, by rank.

        A kv head has a column for each piece that has some of its query heads.
        """
        counts = [length(heads.kv) for pieces in self.pieces for heads in pieces]
        spans = itertools.pairwise(itertools.accumulate(counts, initial=0))
        return [[next(spans) for _ in pieces] for pieces in self.pieces]

    def _columns(self, field: Field, rank: int, piece: int) -> Span:
        """Return which heads of a result a piece of a rank fills."""
        return self.kv_columns[rank][piece] if field.kv else self.pieces[rank][piece].q

    @functools.cached_property
    def _copies(self) -> list[tuple[list[tuple[int, Part, Index]], list[tuple[int, Index, Index]]]]:
        return [(self._received(piece), self._kept(piece)) for piece in range(self.count)]

    def _received(self, piece: int) -> list[tuple[int, Part, Index]]:
        """Return the field of each batch row that is received, its memory, and its place in the
        result.
        """
        found, tokens = [], (0, self.tokens.counts[self.rank])
        for peer, block in self._blocks(self.rank, piece).items():
            for number, (field, part) in enumerate(zip(self.fields, block.parts, strict=True)):
                nbytes = (part.stop - part.start) // self.batch
                columns = self._columns(field, peer, piece)
                for row in range(self.batch if nbytes else 0):
                    start = part.start + row * nbytes
                    here = Part(start, start + nbytes, part.dtype, part.shape[1:])
                    found.append((number, here, field.at(row, tokens, columns)))
        return found

    def _kept(self, piece: int) -> list[tuple[int, Index, Index]]:
        """Return the field of what this rank computes for itself, its index there, and its place
        in the result.
        """
        count = self.tokens.counts[self.rank]
        block = Block(self.fields, self.batch, count, self.pieces[self.rank][piece])
        found = []
        for number, row, span, at in self._rows(block, self.rank):
            field = self.fields[number]
            here = field.at(row, at, (0, length(field.heads(block.heads))))
            there = field.at(row, span, self._columns(field, self.rank, piece))
            found.append((number, here, there))
        return found

    def _nbytes(self, rank: int, piece: int) -> int:
        return max((block.stop for block in self._blocks(rank, piece).values()), default=0)

    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Index, Arrival]]:
        block = self._blocks(target, piece)[source]
        for number, row, span, at in self._rows(block, target):
            field = self.fields[number]
            index = field.at(row, at, (0, length(field.heads(block.heads))))
            yield number, index, block.arrival(source, number, row, span)

    def _blocks(self, rank: int, piece: int) -> dict[int, Block]:
        """Return the blocks that a rank receives, by their sender, one after the other."""
        blocks: dict[int, Block] = {}
        start, count = 0, self.tokens.counts[rank]
        for peer, pieces in enumerate(self.pieces):
            if peer != rank:
                blocks[peer] = Block(self.fields, self.batch, count, pieces[piece], start)
                start = blocks[peer].stop
        return blocks


def _has_rows(x: Tensor) -> bool:
    """Whether each x[i, j] is contiguous and does not overlap with the next one."""
    row = x[0, 0]
    return row.is_contiguous() and x.stride(1) >= row.numel()
