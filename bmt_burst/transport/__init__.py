"""Transports: they move bytes between the ranks of one ring. One backend a file.

torch_dist    process groups of torch.distributed: gloo on CPUs, NCCL on GPUs
bmtrain       BMTrain's NCCL communicators
processes     the base of these two. GPUs of one host write to each other with copy engines
              (copy_engine, cuda_stream).
simulator     ranks as threads of one process, for tests
Alone (here)  a ring of one rank, which never communicates

`regions` says which parts of tensors are sent, and `packing` where whole tensors lie in memory.

Each has a messenger, which carries what ranks agree on between their hosts (messenger, sockets).

To add one, subclass `Transport` and list it in tests/conformance/test_transports.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from .messenger import Echo, Messenger
from .regions import Copies, Region

Messages = list[tuple[Tensor, int]]  # tensors, and the ranks to send them to or receive them from
# Exchanges send each row of a put with so few rows by itself, and pack more rows.
_FEW_ROWS: Final = 16
# Kinds of deliveries. A number of each may be received before the first is released.
LANES: Final = {"visit": 2, "return": 1}


class Ticket(Protocol):
    """An exchange under way, to be waited for once. It keeps the messages' memory until then."""

    def wait(self) -> None:
        """Return when the received bytes may be read and the sent ones overwritten.

        On CUDA both hold for work that is enqueued on the current stream from now on. The host
        does not wait.
        """


class Put(NamedTuple):
    """A tensor for a rank, this one or another, and its place: bytes from the start of the memory
    that the rank receives into.

    With n pitches, each tensor[i, j, ...] of n indices is contiguous. There it begins i *
    pitches[0] + j * pitches[1] + ... bytes after `offset`. Without pitches, the tensor is
    contiguous, here and there.
    """

    tensor: Tensor
    peer: int
    offset: int
    pitches: tuple[int, ...] = ()

    def row_bytes(self) -> Tensor:
        """Return a view of the tensor's memory, (..., bytes) uint8, with a dimension for each
        pitch.
        """
        x = self.tensor
        if not self.pitches:
            return as_bytes(x)
        return Region.whole(x.shape, len(self.pitches)).view(x).view(torch.uint8)


class Arrival(NamedTuple):
    """A place, in bytes, in the memory that this rank receives into. Rank `peer` fills it.

    With n pitches, these are counts[0] x counts[1] x ... rows of `nbytes` bytes, which lie as those
    of a Put.
    """

    peer: int
    offset: int
    nbytes: int
    counts: tuple[int, ...] = ()
    pitches: tuple[int, ...] = ()

    def row_bytes(self, memory: Tensor) -> Tensor:
        """Return a view of the place, (*counts, bytes) uint8."""
        return Region.of_bytes(*self[1:]).view(memory)


class Place(NamedTuple):
    """A contiguous tensor in memory, from byte `start` on."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor in `memory`, uint8."""
        return memory[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class Message(NamedTuple):
    """A Put without its tensor: a region of a tensor, which has a number."""

    tensor: int
    region: Region
    peer: int
    offset: int
    pitches: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Manifest:
    """The messages of a delivery, which calls repeat with other tensors.

    nbytes    the memory that this rank receives into
    messages  what this rank sends
    arrivals  where other ranks' messages land
    landed    the tensors that lie in the memory
    """

    nbytes: int
    messages: Sequence[Message]
    arrivals: Sequence[Arrival]
    landed: Sequence[Place] = ()


@dataclass(frozen=True)
class Delivery:
    """An exchange of puts. They are received into `memory` (bytes, uint8).

    recycled  whether `memory` is written to again once it is released. Otherwise it lasts while it
              is referred to.
    """

    memory: Tensor
    ticket: Ticket
    recycled: bool = False

    def wait(self) -> None:
        """Wait as a Ticket does."""
        self.ticket.wait()

    def release(self) -> None:
        """Promise, once, that work enqueued on the current stream from now on does not read
        `memory`.
        """

    def views(self, manifest: Manifest) -> Sequence[Tensor]:
        """Return the tensors that lie in `memory`."""
        return [place.view(self.memory) for place in manifest.landed]

    def unload(self, copies: Copies, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy, wait, and release. Source 0 is `memory`, and sources[i] is source i + 1.

        The sources were ready when the delivery began, and targets existed. So the copies need not
        wait for work that was enqueued later on the current stream.
        """
        self.wait()
        tensors = self.memory, *sources
        for target, into, source, region in copies.copies:
            place = into.view(targets[target])
            rows = region.view(tensors[source]).view(place.dtype)
            place.copy_(rows)
        self.release()


class Transport(ABC):
    """The ranks of one ring, 0 to size - 1. This one is `rank`.

    It exchanges tensors on `device_types`. All ranks must call its methods in the same order.
    Messages between a pair of ranks arrive in the order in which they were sent.

    messenger  carries what the ranks agree on
    begun      how many deliveries began, if they are counted
    """

    rank: int
    size: int
    messenger: Messenger
    device_types: frozenset[str] = frozenset({"cpu"})
    begun: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that this transport keeps for deliveries."""
        return 0

    @functools.cached_property
    def histories(self) -> MutableMapping[Transport, Any]:
        """Facts that users keep for this ring and another one, as long as that other one exists."""
        return weakref.WeakKeyDictionary()

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        """Start to send each tensor of `sends` to its rank and to fill each of `recvs` from its
        rank, all at once. Return without waiting.

        Tensors are contiguous. Both ends of a message have the same number of bytes. No tensor may
        be touched before the ticket was waited for.
        """

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepare for deliveries of up to these numbers of bytes on each lane.

        All ranks call it with the same numbers, between deliveries. Earlier reservations stay.
        """

    def connect(self, device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepare for exchanges of tensors on `device` in which some ranks have no part.

        All ranks call it.
        """

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> Delivery:
        """Start an exchange that is received into `nbytes` of memory on `device`. Return without
        waiting.

        For each pair of ranks, puts and arrivals have the same order. A rank's puts to itself have
        no arrivals. On a lane (one of LANES) deliveries are released in the order in which they
        began. At most the lane's number of them are unreleased at a time.
        """
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for put in sends:
            if put.peer == self.rank:
                rows = put.row_bytes()
                counts = tuple(rows.shape[:-1])
                place = Arrival(put.peer, put.offset, rows.shape[-1], counts, put.pitches)
                place.row_bytes(memory).copy_(rows)
        leaving = [(put.row_bytes(), put.peer) for put in sends if put.peer != self.rank]
        landing = [(arrival.row_bytes(memory), arrival.peer) for arrival in arrivals]
        messages, recvs = ([*_single_rows(rows)] for rows in (leaving, landing))
        packed = {peer: _pack(rows) for peer, rows in _many_rows(leaving).items()}
        places = _many_rows(landing)
        landed = {peer: _empty_pack(rows) for peer, rows in places.items()}
        ticket = self.exchange(
            [*messages, *((flat, peer) for peer, flat in packed.items())],
            [*recvs, *((flat, peer) for peer, flat in landed.items())],
        )
        if not landed:
            return Delivery(memory, ticket)
        return Delivery(
            memory, _PackedTicket(ticket, [(landed[peer], places[peer]) for peer in landed])
        )

    def deliver_manifest(
        self, lane: str, manifest: Manifest, tensors: Sequence[Tensor], device: torch.device
    ) -> Delivery:
        """Deliver the messages of a manifest, regions of `tensors`, as `deliver` does."""
        puts = [
            Put(region.view(tensors[number]), peer, offset, pitches)
            for number, region, peer, offset, pitches in manifest.messages
        ]
        return self.deliver(lane, manifest.nbytes, puts, manifest.arrivals, device)

    def all_gather(
        self, tensors: list[Tensor], shapes: Sequence[Sequence[torch.Size]]
    ) -> list[list[Tensor]]:
        """Return the contiguous tensors of all ranks, of one dtype, in rank order. `shapes` are
        the shapes of all ranks' tensors.
        """
        everyone = [[tensors[0].new_empty(shape) for shape in theirs] for theirs in shapes]
        everyone[self.rank] = tensors
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(tensor, peer) for peer in others for tensor in tensors if tensor.numel()]
        recvs = [(tensor, peer) for peer in others for tensor in everyone[peer] if tensor.numel()]
        self.exchange(sends, recvs).wait()
        return everyone

    def begin_call(self, doing: str) -> None:  # noqa: B027 - nothing to watch here
        """Note that this rank begins to enqueue what it is `doing` with the others."""

    def end_call(self, is_enqueued: bool) -> None:  # noqa: B027 - as begin_call
        """Note that this rank has enqueued what it began, or has failed."""

    def disconnect(self) -> None:  # noqa: B027 - nobody waits for a process
        """Make the hosts fail that wait for tensors from this rank, which has failed."""


def as_bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as (bytes,) uint8.

    A plain view would refuse some strides of dimensions of one entry.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@dataclass
class _PackedTicket:
    """The ticket of an exchange of packed rows, and the places of the rows in each message."""

    ticket: Ticket
    messages: Sequence[tuple[Tensor, Sequence[Tensor]]]

    def wait(self) -> None:
        self.ticket.wait()
        for flat, places in self.messages:
            for place, rows in zip(places, _split_pack(flat, places), strict=True):
                place.copy_(rows)
        self.messages = ()


def _single_rows(rows: Iterable[tuple[Tensor, int]]) -> Iterator[tuple[Tensor, int]]:
    """Yield the rows (..., bytes) for each rank, or of each rank, that are messages themselves:
    those of tensors with a few rows.
    """
    for x, peer in rows:
        if x.shape[:-1].numel() <= _FEW_ROWS:
            for index in itertools.product(*map(range, x.shape[:-1])):
                yield x[index], peer


def _many_rows(rows: Iterable[tuple[Tensor, int]]) -> dict[int, list[Tensor]]:
    """Return the other tensors for each rank, or of each rank, which are packed."""
    found: dict[int, list[Tensor]] = {}
    for x, peer in rows:
        if x.shape[:-1].numel() > _FEW_ROWS:
            found.setdefault(peer, []).append(x)
    return found


def _pack(rows: Sequence[Tensor]) -> Tensor:
    """Return rows of bytes, (..., bytes) each, as one message."""
    flat = _empty_pack(rows)
    for place, x in zip(_split_pack(flat, rows), rows, strict=True):
        place.copy_(x)
    return flat


def _empty_pack(rows: Sequence[Tensor]) -> Tensor:
    return rows[0].new_empty(sum(x.numel() for x in rows))


def _split_pack(flat: Tensor, rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the part of a message for each of `rows`, in its shape."""
    parts = flat.split([x.numel() for x in rows])
    return (part.view(x.shape) for part, x in zip(parts, rows, strict=True))


class Alone(Transport):
    """A ring of one rank. ALONE is the only one, also after it was copied or pickled."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.messenger = Echo(1)

    def __reduce__(self) -> str:
        return "ALONE"

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        assert not sends and not recvs, "a ring of one rank has nobody to exchange with"
        return Done()


ALONE = Alone()


class Done:
    """The ticket of an exchange that is over."""

    def wait(self) -> None:
        """Return at once."""
