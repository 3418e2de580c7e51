"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visits    each rank sends its tokens to the ranks of the heads. All that belongs to a token lies
          together, so a message has some tokens of all tensors. It lands where a kernel reads it.
Returns   these send their results to the ranks of the tokens, as a kernel leaves them: a message
          has some tokens of one tensor. Where they land, they are copied to their heads.

Each rank sends its own part too, to itself. All places follow from the plan and are found once. So
a call only makes a view for each message. It copies the heads of all ranks at once if these lie
equally far apart.

Letters: B batch, S tokens of a rank, N tokens of a host.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival, Delivery, Put, Transport, as_bytes
from ...transport.packing import Packing
from .heads import Heads
from .tokens import HostTokens

# The best unit, 16 bytes: GPUs take several times as long to copy or join parts of tensors by
# 2-byte numbers.
WIDE = torch.complex128


@dataclass(frozen=True)
class Field:
    """A kind of tensors (B, S, heads, head_size), which are copied as rows (B, S, heads * width) of
    units.

    is_summed  whether parts of the heads are added up instead of copied
    """

    kv: bool
    head_size: int
    dtype: torch.dtype
    unit: torch.dtype
    is_summed: bool = False

    @functools.cached_property
    def width(self) -> int:
        """The units of a head."""
        return self.head_size * self.dtype.itemsize // self.unit.itemsize

    def columns(self, heads: Heads) -> Span:
        """Return the units of some heads in a row."""
        start, stop = heads.kv if self.kv else heads.q
        return start * self.width, stop * self.width

    def to_rows(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor: a view, unless its heads or units lie apart."""
        rows = x.flatten(2)
        if self.unit == self.dtype:
            return rows
        try:
            return rows.view(self.unit)
        except RuntimeError:
            return rows.clone(memory_format=torch.contiguous_format).view(self.unit)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the tensor of some rows: a view, unless its numbers may lie between units."""
        if rows.dtype != self.dtype:
            if self.unit.itemsize < self.dtype.itemsize:
                rows = rows.contiguous()
            rows = rows.view(self.dtype)
        heads = rows.shape[2] // self.head_size  # -1 is ambiguous for a host without tokens
        return rows.view(*rows.shape[:2], heads, self.head_size)


class Move(NamedTuple):
    """A message: bytes of a source, and the first byte where they land at `peer`."""

    source: int
    start: int
    nbytes: int
    peer: int
    there: int


class PieceMessages(NamedTuple):
    """The parts of a piece that a rank sends and receives.

    moves     in the order in which they lie in the sources, which have nothing else
    sizes     their bytes, by source: one operation makes the views of all messages of a source
    arrivals  of each sender in the order of its moves
    """

    moves: list[Move]
    sizes: list[list[int]]
    arrivals: list[Arrival]


class HeadExchange(ABC):
    """The exchanges of all pieces, between ranks 0, 1, ... of a host.

    rank      this one
    pieces    the heads of each piece, by rank
    together  how many ranks' heads lie equally far apart: those of all ranks, or of one
    packings  how messages about these heads lie where they land, by piece and rank
    """

    lane: str

    def __init__(
        self,
        rank: int,
        fields: Sequence[Field],
        batch: int,
        tokens: HostTokens,
        pieces: Sequence[Sequence[Heads]],
        together: int,
    ):
        self.rank, self.fields, self.batch, self.tokens = rank, fields, batch, tokens
        self.pieces, self.together, self.ranks = pieces, together, range(len(pieces[0]))
        self.packings = [[self._pack(heads) for heads in piece] for piece in pieces]

    @property
    @abstractmethod
    def nbytes(self) -> list[int]:
        """The most bytes of each piece that a rank receives."""

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [field.to_rows(x) for field, x in zip(self.fields, tensors, strict=True)]

    @abstractmethod
    def _pack(self, heads: Heads) -> Packing: ...

    @abstractmethod
    def _moves(self, piece: int, sender: int, receiver: int) -> Iterator[Move]:
        """Yield the messages of one rank to another, or to itself."""

    @functools.cached_property
    def _messages(self) -> list[PieceMessages]:
        """The messages of each piece."""
        return [self._find_messages(piece) for piece in range(len(self.pieces))]

    def _find_messages(self, piece: int) -> PieceMessages:
        moves, arrivals = list[Move](), list[Arrival]()
        for peer in self.ranks:
            moves += self._moves(piece, self.rank, peer)
            if peer != self.rank:
                landing = sorted(self._moves(piece, peer, self.rank))
                arrivals += [Arrival(peer, move.there, move.nbytes) for move in landing]
        moves.sort()
        by_source = itertools.groupby(moves, key=lambda move: move.source)
        sizes = [[move.nbytes for move in same] for _, same in by_source]
        return PieceMessages(moves, sizes, arrivals)

    def _deliver(
        self, transport: Transport, piece: int, sources: Iterable[Tensor], device: torch.device
    ) -> Delivery:
        moves, sizes, arrivals = self._messages[piece]
        parts = list[Tensor]()
        for source, cuts in zip(sources, sizes, strict=False):  # one without tokens has no sizes
            parts += as_bytes(source).split(cuts)
        puts = [Put(part, x.peer, x.there) for part, x in zip(parts, moves, strict=True)]
        return transport.deliver(self.lane, self.nbytes[piece], puts, arrivals, device)

    def _cut(self, piece: int, first: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return views of the heads of the ranks from `first` on that are `together`, in rows of
        all heads: (ranks, B, S, units) of each field.
        """
        heads, last = (self.pieces[piece][rank] for rank in (first, first + self.together - 1))
        found = list[Tensor]()
        for field, x in zip(self.fields, rows, strict=True):
            start, stop = field.columns(heads)
            distance = (field.columns(last)[0] - start) // max(self.together - 1, 1)
            distance *= x.stride(2)
            found.append(_spread(x, (start, stop), self.together, distance))
        return found


class Visits(HeadExchange):
    """Each rank sends its tokens to the ranks that compute their heads."""

    lane = "visit"

    @functools.cached_property
    def nbytes(self) -> list[int]:
        total = self.tokens.total
        return [max(packing.nbytes(total) for packing in packings) for packings in self.packings]

    def start(self, transport: Transport, piece: int, rows: Sequence[Tensor]) -> Delivery:
        """Send this rank's tokens of a piece. `rows` are those of all heads."""
        # `_deliver` pairs sources with those of the moves in order. Ranks without heads have none.
        firsts = [r for r in self.ranks[:: self.together] if length(self.pieces[piece][r].q)]
        sources = [torch.cat(self._cut(piece, first, rows), 3) for first in firsts]
        return self._deliver(transport, piece, sources, rows[0].device)

    def receive(self, piece: int, delivery: Delivery) -> list[Tensor]:
        """Return the fields of this rank's heads, for all tokens of the host in the order of their
        positions. They are valid until the delivery is released.
        """
        [rows] = self.packings[piece][self.rank].views(delivery.memory, self.tokens.total)
        heads = self.pieces[piece][self.rank]
        numbers = self.tokens.sort(rows).view(self.fields[0].dtype)  # most fields have this dtype
        ratio = rows.itemsize // numbers.itemsize
        widths = [length(field.columns(heads)) * ratio for field in self.fields]
        parts = numbers.split(widths, 2)
        return [field.from_rows(part) for field, part in zip(self.fields, parts, strict=True)]

    def _pack(self, heads: Heads) -> Packing:
        width = sum(length(field.columns(heads)) for field in self.fields)
        return Packing(self.batch, (((width,), self.fields[0].unit),))

    def _moves(self, piece: int, sender: int, receiver: int) -> Iterator[Move]:
        packing, count = self.packings[piece][receiver], self.tokens.counts[sender]
        source, index = divmod(receiver, self.together)
        # a source is (ranks, B, S, units), as `start` joins the heads of ranks that are together
        before = index * packing.token_bytes() * count
        for span, at in self.tokens.spans[sender]:
            for _, row, there, nbytes in packing.rows(at, self.tokens.total):
                start = before + (row * count + span[0]) * (nbytes // length(at))
                yield Move(source, start, nbytes, receiver, there)


class Returns(HeadExchange):
    """The ranks of the heads send results to the ranks of the tokens."""

    lane = "return"

    @functools.cached_property
    def starts(self) -> list[list[int]]:
        """The first byte of each piece that a rank receives from each rank, and the end."""
        most, found = max(self.tokens.counts), list[list[int]]()
        for packings in self.packings:
            sizes = (packing.nbytes(most) for packing in packings)
            found.append([*itertools.accumulate(sizes, initial=0)])
        return found

    @property
    def nbytes(self) -> list[int]:
        return [starts[-1] for starts in self.starts]

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
        sources = [x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True)]
        if not self.tokens.is_sorted:
            pairs = zip(self.fields, sources, strict=False)
            sources = [self.tokens.unsort(field.to_rows(x)) for field, x in pairs]
        return self._deliver(transport, piece, [x.contiguous() for x in sources], device)

    def receive(self, piece: int, delivery: Delivery, results: Sequence[Tensor]) -> None:
        """Wait for the results of all ranks and put them in the rows `results` of this rank's
        tokens. Release the delivery.
        """
        packings, starts = self.packings[piece], self.starts[piece]
        tokens = self.tokens.counts[self.rank]
        delivery.wait()
        for first in self.ranks[:: self.together]:
            views = packings[first].views(delivery.memory, tokens, starts[first])
            into = self._cut(piece, first, results)
            for field, x, rows in zip(self.fields, into, views, strict=True):
                distance = (starts[first + 1] - starts[first]) // rows.itemsize
                landed = _spread(rows, (0, rows.shape[2]), self.together, distance)
                x.add_(landed) if field.is_summed else x.copy_(landed)
        delivery.release()

    def _pack(self, heads: Heads) -> Packing:
        entries = (((length(x.columns(heads)),), x.unit) for x in self.fields)
        return Packing(self.batch, tuple(entries))

    def _moves(self, piece: int, sender: int, receiver: int) -> Iterator[Move]:
        packing, start = self.packings[piece][sender], self.starts[piece][sender]
        for span, at in self.tokens.spans[receiver]:
            for source, row, there, nbytes in packing.rows(span, self.tokens.counts[receiver]):
                first = (row * self.tokens.total + at[0]) * (nbytes // length(at))
                yield Move(source, first, nbytes, receiver, start + there)


def _spread(rows: Tensor, columns: Span, count: int, distance: int) -> Tensor:
    """Return a view of some columns of rows (B, S, units), and of others like these that lie
    `distance` apart in memory: (count, B, S, units).
    """
    shape = count, *rows.shape[:2], length(columns)
    first = rows.storage_offset() + columns[0] * rows.stride(2)
    return rows.as_strided(shape, (distance, *rows.stride()), first)
