"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visits    each rank sends its tokens to the ranks of the heads
Returns   these send what they computed back to the ranks of the tokens

A rank sends one message to each other rank: some heads of all fields, one field after the other. It
copies its own part without a message. All places follow from the plan, so a call only makes views
of memory and copies between them.

Letters: B batch, S tokens of a rank, N tokens of a host, T tokens of a message, D head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival, Delivery, Put, Transport
from .heads import Heads
from .tokens import HostTokens

# The unit of most copies. GPUs take several times as long to copy parts of tensors, or to join
# them, by 2-byte numbers.
_WIDE = torch.complex128


@dataclass(frozen=True)
class Field:
    """A tensor that is exchanged: (B, S, heads, D), or (B, heads, S) for a `head_size` of 0.

    It is copied as rows (B, S, heads * width) of units.

    kv         whether its heads are kv heads
    is_summed  whether parts of its heads are added up instead of copied
    """

    kv: bool
    head_size: int
    dtype: torch.dtype
    is_summed: bool = False

    @functools.cached_property
    def unit(self) -> torch.dtype:
        is_wide = self.head_size and self.head_size * self.dtype.itemsize % _WIDE.itemsize == 0
        return _WIDE if is_wide and not self.is_summed else self.dtype

    @functools.cached_property
    def width(self) -> int:
        """The units of a head."""
        return max(self.head_size, 1) * self.dtype.itemsize // self.unit.itemsize

    def columns(self, heads: Heads) -> Span:
        """Return the units of some heads in a row."""
        start, stop = heads.kv if self.kv else heads.q
        return start * self.width, stop * self.width

    def to_rows(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor: a view, unless its heads or units lie apart."""
        if not self.head_size:
            return x.transpose(1, 2)
        rows = x.flatten(2)
        if self.unit == self.dtype:
            return rows
        ratio = self.unit.itemsize // self.dtype.itemsize
        places = rows.storage_offset(), rows.stride(0), rows.stride(1)
        if rows.stride(2) != 1 or any(place % ratio for place in places):
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows.view(self.unit)

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return a contiguous tensor from its contiguous rows."""
        if not self.head_size:
            return rows.transpose(1, 2).contiguous()
        return rows.view(self.dtype).view(*rows.shape[:2], -1, self.head_size)

    def put(self, into: Tensor, rows: Tensor) -> None:
        """Copy some heads into a result, or add them to it."""
        if self.is_summed:
            into.add_(rows)
        else:
            into.copy_(rows)


class Place(NamedTuple):
    """The rows of a field in a message, (B, T, units), from unit `start` on."""

    unit: torch.dtype
    shape: tuple[int, int, int]
    start: int

    def view(self, units: Tensor) -> Tensor:
        _, tokens, size = self.shape
        strides = tokens * size, size, 1
        return units.as_strided(self.shape, strides, units.storage_offset() + self.start)


class Message(NamedTuple):
    """A message to or from `peer`: tokens of one of the two ranks, and the heads of the other.

    start    its first byte here
    there    its first byte at the other rank
    heads    the other's heads, or this rank's
    places   the rows of each field
    """

    peer: int
    start: int
    there: int
    nbytes: int
    heads: Heads
    places: list[Place]

    def rows(self, memory: Tensor) -> list[Tensor]:
        """Return the rows of each field."""
        message = memory.narrow(0, self.start, self.nbytes)
        units = {unit: message.view(unit) for unit in dict.fromkeys(x.unit for x in self.places)}
        return [place.view(units[place.unit]) for place in self.places]


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
    def nbytes(self) -> int:
        """The most bytes that a rank receives at once."""
        return max(self._memory_bytes)

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [field.to_rows(x) for field, x in zip(self.fields, tensors, strict=True)]

    @functools.cached_property
    def of_heads(self) -> list[list[Message]]:
        """The messages of each piece with tokens of this rank and heads of others."""
        owner = [self.rank] * len(self.pieces)
        return [self._messages(piece, owner, range(len(self.pieces))) for piece in self._numbers]

    @functools.cached_property
    def of_tokens(self) -> list[list[Message]]:
        """The messages of each piece with tokens of others and heads of this rank."""
        computer = [self.rank] * len(self.pieces)
        return [self._messages(piece, range(len(self.pieces)), computer) for piece in self._numbers]

    @property
    def _numbers(self) -> range:
        return range(len(self.pieces[0]))

    @functools.cached_property
    def _memory_bytes(self) -> list[int]:
        """The bytes of each piece that a rank sends or receives, with equal room for each peer."""
        most = max(self.tokens.counts)
        room = [
            max(self._place(most, pieces[piece])[1] for pieces in self.pieces)
            for piece in self._numbers
        ]
        return [nbytes * (len(self.pieces) - 1) for nbytes in room]

    def _messages(
        self, piece: int, owners: Sequence[int], computers: Sequence[int]
    ) -> list[Message]:
        """Return the messages to or from each peer, by the owners of the tokens and the ranks that
        compute the heads. Empty ones are not sent.
        """
        found: list[Message] = []
        room = self._memory_bytes[piece] // max(len(self.pieces) - 1, 1)
        for peer, (owner, computer) in enumerate(zip(owners, computers, strict=True)):
            heads = self.pieces[computer][piece]
            places, nbytes = self._place(self.tokens.counts[owner], heads)
            if nbytes and peer != self.rank:
                # ranks leave no room for themselves
                start, there = peer - (peer > self.rank), self.rank - (self.rank > peer)
                found.append(Message(peer, start * room, there * room, nbytes, heads, places))
        return found

    def _place(self, tokens: int, heads: Heads) -> tuple[list[Place], int]:
        """Return the places of some tokens and heads in a message, and its bytes."""
        places, stop = list[Place](), 0
        for field in self.fields:
            shape, nbytes = (self.batch, tokens, length(field.columns(heads))), field.unit.itemsize
            places.append(Place(field.unit, shape, stop // nbytes))
            stop += -(-math.prod(shape) * nbytes // _WIDE.itemsize) * _WIDE.itemsize
        return places, stop

    def _memory(self, piece: int, device: torch.device) -> Tensor:
        """Make memory for the messages of a piece."""
        return torch.empty(self._memory_bytes[piece], dtype=torch.uint8, device=device)

    def _deliver(
        self,
        transport: Transport,
        lane: str,
        piece: int,
        memory: Tensor,
        sent: Sequence[Message],
        received: Sequence[Message],
    ) -> Delivery:
        puts = [Put(memory.narrow(0, x.start, x.nbytes), x.peer, x.there) for x in sent]
        arrivals = [Arrival(x.peer, x.start, x.nbytes) for x in received]
        return transport.deliver(lane, self._memory_bytes[piece], puts, arrivals, memory.device)

    def _own(self, rows: Sequence[Tensor], heads: Heads) -> list[Tensor]:
        """Return some heads of the rows of all heads."""
        spans = [field.columns(heads) for field in self.fields]
        return [x.narrow(2, at[0], length(at)) for x, at in zip(rows, spans, strict=True)]


class Visits(Exchange):
    """Each rank sends its tokens to the ranks that compute their heads."""

    def start(self, transport: Transport, piece: int, rows: Sequence[Tensor]) -> Delivery:
        """Send this rank's tokens of a piece. `rows` are those of all heads."""
        memory = self._memory(piece, rows[0].device)
        for message in self.of_heads[piece]:
            sources = self._own(rows, message.heads)
            for into, x in zip(message.rows(memory), sources, strict=True):
                into.copy_(x)
        sent, received = self.of_heads[piece], self.of_tokens[piece]
        return self._deliver(transport, "visit", piece, memory, sent, received)

    def receive(self, piece: int, delivery: Delivery, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the fields of this rank's heads, for all tokens of the host in the order of their
        positions. They do not depend on the delivery any more.
        """
        parts = {x.peer: x.rows(delivery.memory) for x in self.of_tokens[piece]}
        parts[self.rank] = own = self._own(rows, self.pieces[self.rank][piece])
        if not self.of_tokens[piece]:
            return [
                field.from_rows(x.contiguous()) for field, x in zip(self.fields, own, strict=True)
            ]
        found = list[Tensor]()
        for number, field in enumerate(self.fields):
            runs = [_cut(parts[rank][number], span) for rank, span in self.tokens.order]
            found.append(field.from_rows(self.tokens.sort(torch.cat(runs, 1))))
        return found


class Returns(Exchange):
    """The ranks of the heads send results to the ranks of the tokens."""

    def start(
        self,
        transport: Transport,
        piece: int,
        parts: Sequence[Sequence[Tensor]],
        results: Sequence[Tensor],
    ) -> Delivery:
        """Send the results of a piece, and put those of this rank's tokens in the rows `results`.

        The parts have some of its heads each, in their order, and all tokens of the host in the
        order of their positions.
        """
        memory = self._memory(piece, results[0].device)
        into = {x.peer: x.rows(memory) for x in self.of_tokens[piece]}
        own = self._own(results, self.pieces[self.rank][piece])
        for number, same in enumerate(zip(*parts, strict=True)):
            field = self.fields[number]
            rows = [field.to_rows(x) for x in same]
            joined = self.tokens.unsort(rows[0] if len(rows) == 1 else torch.cat(rows, 2))
            for peer, fields in into.items():
                runs = [_cut(joined, at) for _, at in self.tokens.spans[peer]]
                torch.cat(runs, 1, out=fields[number])
            for span, at in self.tokens.spans[self.rank]:
                field.put(_cut(own[number], span), _cut(joined, at))
        sent, received = self.of_tokens[piece], self.of_heads[piece]
        return self._deliver(transport, "return", piece, memory, sent, received)

    def receive(self, piece: int, delivery: Delivery, results: Sequence[Tensor]) -> None:
        """Put the results of other ranks in the rows `results` of this rank's tokens."""
        for message in self.of_heads[piece]:
            into = self._own(results, message.heads)
            for field, x, rows in zip(
                self.fields, into, message.rows(delivery.memory), strict=True
            ):
                field.put(x, rows)


def _cut(x: Tensor, tokens: Span) -> Tensor:
    return x.narrow(1, tokens[0], length(tokens))
