"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visits    each rank sends its tokens to the ranks of the heads
Returns   these send what they computed back to the ranks of the tokens

Every message lands where it is used, and is read where it was computed. So nothing is packed: a
message is a region of a tensor, with equal distances at both ends (see `bmt_burst.transport`).

Letters: B batch, S tokens of a rank or a host, D head size.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...sequence.span import Span, length
from ...transport import Arrival, Delivery, Manifest, Message, Place, Transport
from ...transport.regions import Copies, Copy, Region
from .blocks import Block, Field, Tokens
from .heads import Heads
from .tokens import HostTokens


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
            arrival.nbytes * math.prod(arrival.counts)
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
        return transport.deliver_manifest(self.lane, self.manifests[piece], tensors, device)

    def _manifest(self, piece: int) -> Manifest:
        messages = [
            Message(field, region, peer, arrival.offset, arrival.pitches)
            for peer in (*self._others, *[self.rank] * self.to_itself)
            for field, region, arrival in self._messages(piece, self.rank, peer)
        ]
        arrivals = [
            arrival
            for peer in self._others
            for *_, arrival in self._messages(piece, peer, self.rank)
        ]
        return Manifest(self._nbytes(self.rank, piece), messages, arrivals, self._landed(piece))

    @property
    def _others(self) -> list[int]:
        return [peer for peer in range(len(self.pieces)) if peer != self.rank]

    def _runs(self, block: Block, rank: int) -> Iterator[tuple[int, Tokens, Tokens]]:
        """Yield (field, tokens, place) of the tokens of a rank in each field of a block that has
        heads: tokens of its shard, and where they lie among the tokens of the host.
        """
        for number, field in enumerate(self.fields):
            if length(field.heads(block.heads)):
                for tokens, at in find_runs(self.tokens.spans[rank]):
                    yield number, tokens, at

    def _landed(self, piece: int) -> Sequence[Place]:
        """Return the tensors that this rank receives whole."""
        return ()

    @abstractmethod
    def _nbytes(self, rank: int, piece: int) -> int:
        """Return the bytes that a rank receives into."""

    @abstractmethod
    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Region, Arrival]]:
        """Yield the field of each message between two ranks, its region at the source and its place
        at the target. There are no empty ones.
        """


class Visits(Exchange):
    """Every rank sends tokens to the ranks that compute their heads, itself among them."""

    lane = "visit"
    to_itself = True

    def views(self, piece: int, delivery: Delivery) -> Sequence[Tensor]:
        """Return the fields of this rank's heads: all tokens of the host, as they lie in memory."""
        return delivery.views(self.manifests[piece])

    def _landed(self, piece: int) -> Sequence[Place]:
        return self._block(self.rank, piece).parts

    def _nbytes(self, rank: int, piece: int) -> int:
        return self._block(rank, piece).stop

    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Region, Arrival]]:
        block = self._block(target, piece)
        for number, tokens, at in self._runs(block, source):
            field = self.fields[number]
            region = field.region(self.batch, tokens, field.heads(block.heads))
            yield number, region, block.arrival(source, number, at)

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
        delivery.unload(self._copies[piece], results, computed)

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
    def _copies(self) -> list[Copies]:
        """The copies of `unload` for each piece. Source 0 is memory; others are `computed`."""
        return [Copies((*self._received(piece), *self._kept(piece))) for piece in range(self.count)]

    def _received(self, piece: int) -> Iterator[Copy]:
        """Yield the copies of what is received."""
        count = self.tokens.counts[self.rank]
        for peer, block in self._blocks(self.rank, piece).items():
            for number, field in enumerate(self.fields):
                columns = self._columns(field, peer, piece)
                if length(columns) and count:
                    tokens = Tokens(0, count)
                    into = field.region(self.batch, tokens, columns)
                    here = Region.of_bytes(*block.arrival(peer, number, tokens)[1:])
                    yield Copy(number, into, 0, here)

    def _kept(self, piece: int) -> Iterator[Copy]:
        """Yield the copies of what this rank computes for itself."""
        count = self.tokens.counts[self.rank]
        block = Block(self.fields, self.batch, count, self.pieces[self.rank][piece])
        for number, tokens, at in self._runs(block, self.rank):
            field = self.fields[number]
            here = field.region(self.batch, at, (0, length(field.heads(block.heads))))
            into = field.region(self.batch, tokens, self._columns(field, self.rank, piece))
            yield Copy(number, into, number + 1, here)

    def _nbytes(self, rank: int, piece: int) -> int:
        return max((block.stop for block in self._blocks(rank, piece).values()), default=0)

    def _messages(
        self, piece: int, source: int, target: int
    ) -> Iterator[tuple[int, Region, Arrival]]:
        block = self._blocks(target, piece)[source]
        for number, tokens, at in self._runs(block, target):
            field = self.fields[number]
            region = field.region(self.batch, at, (0, length(field.heads(block.heads))))
            yield number, region, block.arrival(source, number, tokens)

    def _blocks(self, rank: int, piece: int) -> dict[int, Block]:
        """Return the blocks that a rank receives, by their sender, one after the other."""
        blocks: dict[int, Block] = {}
        start, count = 0, self.tokens.counts[rank]
        for peer, pieces in enumerate(self.pieces):
            if peer != rank:
                blocks[peer] = Block(self.fields, self.batch, count, pieces[piece], start)
                start = blocks[peer].stop
        return blocks


def find_runs(spans: Sequence[tuple[Span, int]]) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the tokens of (span, place) pairs, and where they lie. Spans of one length at equal
    distances, here and there, are yielded together.
    """
    found: list[list[tuple[Span, int]]] = []
    for span, at in spans:
        if found and _is_next(found[-1], span, at):
            found[-1].append((span, at))
        elif length(span):
            found.append([(span, at)])
    for equal in found:
        (span, at), (last, last_at), gaps = equal[0], equal[-1], max(len(equal) - 1, 1)
        steps = (last[0] - span[0]) // gaps, (last_at - at) // gaps
        here, there = (
            Tokens(start, length(span), step, len(equal))
            for start, step in zip((span[0], at), steps, strict=True)
        )
        yield here, there


def _is_next(equal: Sequence[tuple[Span, int]], span: Span, at: int) -> bool:
    """Whether a span is as long as those before, and follows at their distance, here and there."""
    (before, before_at), first = equal[-1], equal[-min(len(equal), 2)]
    steps = span[0] - before[0], at - before_at
    is_equal = len(equal) == 1 or steps == (before[0] - first[0][0], before_at - first[1])
    return is_equal and length(span) == length(before) and min(steps) > 0


def _has_rows(x: Tensor) -> bool:
    """Whether each x[i, j] is contiguous and does not overlap with the next one."""
    row = x[0, 0]
    return row.is_contiguous() and x.stride(1) >= row.numel()
