"""The exchanges between the ranks of a host. Each piece of heads has one of each kind.

Visit    each rank sends its tokens to the ranks of the heads. All that belongs to a token lies
         together, so a message has some tokens of all tensors. It lands where a kernel reads it.
Return   these send their results to the ranks of the tokens, as a kernel leaves them: a message
         has some tokens of one tensor. Where they land, they are copied to their heads.

Each rank sends its own part too, to itself. All places follow from the plan and are found once. A
call makes a view for each message, and copies heads of all ranks at once if they lie equally far
apart.

Letters: B batch, S tokens of a rank, N tokens of a host.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...base.dtypes import WIDE
from ...base.streams import Stream, current_stream, send_to_device
from ...sequence.layout import Layout
from ...sequence.span import Span, in_turn, length, merged
from ...transport import Arrival, Delivery, Put, Transport
from .heads import kv_heads

# runs of a rank's positions; more of them are more messages than kernels that sort are worth
_MOST_RUNS = 4


class HostLayout(Layout):
    """The layout of tokens on hosts of `inner` ranks each, in rising order. `layout` is that of
    the ranks.
    """

    name = "of hosts"

    def __init__(self, layout: Layout, inner: int):
        super().__init__(layout.seq_len, layout.size // inner)
        self.layout, self.inner = layout, inner

    def ranges(self, rank: int) -> Sequence[range]:
        if self.size == 1:
            return [range(self.seq_len)]
        shards = self.layout.shards[rank * self.inner : (rank + 1) * self.inner]
        spans = list[Span]()
        for positions in itertools.chain.from_iterable(shards):
            if positions.step == 1:
                spans.append((positions.start, positions.stop))
            else:
                spans += [(position, position + 1) for position in positions]
        return [range(*span) for span in merged(spans)]


class HostTokens:
    """The tokens of a host as its ranks exchange them.

    They lie in the order of their positions, if that takes few messages. Otherwise they lie in the
    order of the ranks, and `sort` brings them into the order of their positions.

    counts     the number of tokens of each rank
    is_sorted  whether tokens lie in the order of their positions
    parts      (rank, span of its tokens, their place in memory), in the order of places
    """

    def __init__(self, hosts: HostLayout, host: int):
        self.hosts, self.host, layout = hosts, host, hosts.layout
        ranks = range(host * hosts.inner, (host + 1) * hosts.inner)
        self.counts = [layout.length(rank) for rank in ranks]
        self.total = sum(self.counts)
        runs = [layout.runs(rank) for rank in ranks]
        self.is_sorted = max(map(len, runs)) <= _MOST_RUNS and all(
            run.step == 1 or length(run.span) < 2 for run in itertools.chain(*runs)
        )
        parts = [(0, place, (0, count)) for place, count in enumerate(self.counts) if count]
        if self.is_sorted:
            by_rank = enumerate(runs)
            parts = sorted((run.start, place, run.span) for place, own in by_rank for run in own)
        places = in_turn(span for *_, span in parts)
        self.parts = [(part[1], *place) for part, place in zip(parts, places, strict=True)]

    def sort(self, x: Tensor) -> Tensor:
        """Return x (B, N, ...) with tokens in the order of their positions, from that of memory."""
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[0])

    def unsort(self, x: Tensor) -> Tensor:
        return x if self.is_sorted else x.index_select(1, self._orders(x.device)[1])

    def _orders(self, device: torch.device) -> Tensor:
        hosts = self.hosts
        return _orders(hosts.layout, hosts.inner, self.host, device, current_stream(device))


@functools.lru_cache(maxsize=4)  # large on GPUs where every step has a layout of its own
def _orders(
    layout: Layout, inner: int, host: int, device: torch.device, stream: Stream | None
) -> Tensor:
    """Return the indices that sort the tokens of a host's ranks, and those that undo it: (2, N),
    for work on `stream`.
    """
    ranks = range(host * inner, (host + 1) * inner)
    order = torch.cat([layout.positions(rank) for rank in ranks]).argsort()
    return send_to_device(torch.stack((order, order.argsort())), device)


@dataclass(frozen=True)
class Field:
    """A kind of tensors (B, S, heads, head_size), which are copied as rows (B, S, units).

    ratio      the query heads of each head: 1, or more for kv heads
    is_summed  whether parts of the heads are added up instead of copied
    """

    ratio: int
    head_size: int
    dtype: torch.dtype
    unit: torch.dtype
    is_summed: bool = False

    def columns(self, heads: Span) -> Span:
        """Return the units of some query heads, or of their kv heads, in a row."""
        width = self.head_size * self.dtype.itemsize // self.unit.itemsize
        start, stop = kv_heads(heads, self.ratio)
        return start * width, stop * width

    def to_rows(self, x: Tensor) -> Tensor:
        """Return the rows of a tensor: a view, unless its heads or units lie apart."""
        rows = x.flatten(2)
        return rows if self.unit == self.dtype else _view_as(rows, self.unit)  # sums are wider

    def from_rows(self, rows: Tensor) -> Tensor:
        """Return the tensor of some rows: a view, unless its numbers may lie between units."""
        rows = _view_as(rows, self.dtype)
        heads = rows.shape[2] // self.head_size  # -1 is ambiguous for a host without tokens
        return rows.view(*rows.shape[:2], heads, self.head_size)


def _view_as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    if rows.dtype == dtype:
        return rows
    try:
        return rows.view(dtype)
    except RuntimeError:
        return rows.clone(memory_format=torch.contiguous_format).view(dtype)


@dataclass(eq=False)
class HeadExchange(ABC):
    """An exchange of a piece between ranks 0, 1, ... of a host. This one is `rank`.

    heads   the heads of each rank
    groups  the ranks whose heads are copied at once: all, if they have equally many kv heads, or
            each alone
    nbytes  the most bytes that a rank receives
    """

    fields: Sequence[Field]
    heads: Sequence[Span]
    tokens: HostTokens
    rank: int
    batch: int
    groups: Sequence[range]
    lane: ClassVar[str]

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def _find_messages(self, sender: int, receivers: Sequence[int]) -> list[list[Arrival]]:
        """Return the messages of one rank to others or to itself, for each tensor that it sends:
        receivers and places there, in the order in which the messages lie in the tensor.
        """

    @functools.cached_property
    def columns(self) -> list[list[Span]]:
        """The units of the heads of each rank, by rank and field."""
        return [[field.columns(heads) for field in self.fields] for heads in self.heads]

    @functools.cached_property
    def token_bytes(self) -> list[list[int]]:
        units = [field.unit.itemsize for field in self.fields]
        return [[length(x) * n for x, n in zip(row, units, strict=True)] for row in self.columns]

    @functools.cached_property
    def _messages(self) -> tuple[list[list[Arrival]], list[Arrival]]:
        """The messages that this rank sends, and those that arrive from others."""
        ranks = range(len(self.heads))
        arrivals = [
            message._replace(peer=peer)
            for peer in ranks
            if peer != self.rank
            for message in itertools.chain(*self._find_messages(peer, [self.rank]))
            if message.nbytes
        ]
        return self._find_messages(self.rank, ranks), arrivals

    def _deliver(
        self, transport: Transport, sources: Sequence[Tensor], device: torch.device
    ) -> Delivery:
        (leaving, arrivals), puts = self._messages, list[Put]()
        for source, messages in zip(sources, leaving, strict=False):  # without heads, no sources
            # One operation makes the views of all messages.
            sizes = [nbytes // source.itemsize for _, _, nbytes in messages]
            pairs = zip(source.view(-1).split_with_sizes(sizes), messages, strict=True)
            puts += [Put(part, peer, at) for part, (peer, at, nbytes) in pairs if nbytes]
        return transport.deliver(self.lane, self.nbytes, puts, arrivals, device)

    def to_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of all heads: (ranks of a group, B, S, units), for each field."""
        rows = [field.to_rows(x) for field, x in zip(self.fields, tensors, strict=True)]
        ranks = len(self.groups[0])
        return [x.view(*x.shape[:2], ranks, x.shape[2] // ranks).permute(2, 0, 1, 3) for x in rows]

    def _take_heads(self, rows: Sequence[Tensor], group: range) -> list[Tensor]:
        """Return views of the heads of a group: (ranks, B, S, units), for each field."""
        spans = self.columns[group[0]]
        return [x.narrow(3, at[0], length(at)) for x, at in zip(rows, spans, strict=True)]


class Visit(HeadExchange):
    """An exchange before heads are computed. Fields have one unit."""

    lane = "visit"

    @functools.cached_property
    def nbytes(self) -> int:
        return self.batch * self.tokens.total * max(map(sum, self.token_bytes))

    def start(self, transport: Transport, rows: Sequence[Tensor]) -> Delivery:
        """Send this rank's tokens. `rows` are those of all heads."""
        sources = [torch.cat(self._take_heads(rows, group), 3) for group in self.groups]
        return self._deliver(transport, sources, rows[0].device)

    def receive(self, delivery: Delivery) -> list[Tensor]:
        """Return the fields of this rank's heads, until the delivery is released: for all tokens
        of the host in the order of their positions.
        """
        field, token_bytes = self.fields[0], self.token_bytes[self.rank]
        shape = self.batch, self.tokens.total, sum(token_bytes) // field.unit.itemsize
        landed = delivery.memory[: math.prod(shape) * field.unit.itemsize].view(field.unit)
        numbers = self.tokens.sort(landed.view(shape)).view(field.dtype)  # most have this dtype
        parts = numbers.split([nbytes // field.dtype.itemsize for nbytes in token_bytes], 2)
        return [field.from_rows(part) for field, part in zip(self.fields, parts, strict=True)]

    def _find_messages(self, sender: int, receivers: Sequence[int]) -> list[list[Arrival]]:
        places = [at for rank, _, at in self.tokens.parts if rank == sender]
        return [
            [
                _message(peer, sum(self.token_bytes[peer]), at, row * self.tokens.total)
                for peer in group
                if peer in receivers
                for row in range(self.batch)
                for at in places
            ]
            for group in self.groups
        ]


class Return(HeadExchange):
    """An exchange of results. Of each field, the parts of all ranks land one after the other."""

    lane = "return"

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first byte of each field where it lands, and the end."""
        most = self.batch * max(self.tokens.counts)
        of_fields = map(sum, zip(*self.token_bytes, strict=True))
        aligned = (most * -(-nbytes // WIDE.itemsize) * WIDE.itemsize for nbytes in of_fields)
        return [*itertools.accumulate(aligned, initial=0)]

    @property
    def nbytes(self) -> int:
        return self.starts[-1]

    def start(
        self, transport: Transport, results: Sequence[Tensor], device: torch.device
    ) -> Delivery:
        """Send results for all tokens of the host in the order of their positions, if any."""
        sources = [self.tokens.unsort(x).contiguous() for x in results]
        return self._deliver(transport, sources, device)

    def receive(self, delivery: Delivery, results: Sequence[Tensor]) -> None:
        """Wait for the results of all ranks and put them in the rows `results` of this rank's
        tokens.
        """
        delivery.wait()
        starts = self.starts[:-1]
        for group in self.groups:
            for i, into in enumerate(self._take_heads(results, group)):
                field, start = self.fields[i], starts[i]
                starts[i] += into.numel() * field.unit.itemsize
                landed = delivery.memory[start : starts[i]].view(field.unit).view(into.shape)
                into.add_(landed) if field.is_summed else into.copy_(landed)
        delivery.release()

    def _find_messages(self, sender: int, receivers: Sequence[int]) -> list[list[Arrival]]:
        found, counts = list[list[Arrival]](), self.tokens.counts
        for start, by_rank in zip(self.starts, zip(*self.token_bytes, strict=True), strict=False):
            before, nbytes = sum(by_rank[:sender]) * self.batch, by_rank[sender]
            found.append(
                [
                    _message(peer, nbytes, span, row * counts[peer], start + before * counts[peer])
                    for row in range(self.batch)
                    for peer, span, _ in self.tokens.parts
                    if peer in receivers
                ]
            )
        return found


def _message(peer: int, token_bytes: int, at: Span, first: int, start: int = 0) -> Arrival:
    """Return a message that lands as tokens `at` of a batch row.

    first  the tokens in the memory before that row
    start  the first byte of that memory
    """
    return Arrival(peer, start + (first + at[0]) * token_bytes, length(at) * token_bytes)
