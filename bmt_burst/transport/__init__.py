"""Transports: how bytes move between the ranks of one ring. One backend a file.

torch_dist    torch.distributed process groups: gloo on CPU, NCCL on GPU
bmtrain       BMTrain's NCCL communicators
processes     what these two share: on one host messages through memory (host_memory), deliveries by
              copy_engine
simulator     ranks as threads of one process, for tests
Alone (here)  a ring of one rank, which never communicates
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import RankLate

Messages = list[tuple[Tensor, int]]  # tensors and the ranks that they go to or come from
# Seconds after which a rank that takes no part is an error, unless its group's own timeout is
# longer. May be set before the first call.
AGREEMENT_TIMEOUT = 120.0
MESSAGE_BYTES = 4096  # the longest message that `gather` carries
# kinds of deliveries, and how many of a kind may land before the first is released
LANES = {"visit": 2, "return": 1}


class Ticket(Protocol):
    """An exchange under way; to be waited for once. Keeps the messages' memory until then."""

    def wait(self) -> None:
        """Returns when the received bytes may be read and the sent ones overwritten.

        On CUDA both hold for work enqueued on the current stream from now on; the host does not
        wait.
        """


class Put(NamedTuple):
    """A contiguous tensor for a rank, and where it lands: bytes from the start of what that rank
    receives into.
    """

    tensor: Tensor
    peer: int
    offset: int


class Arrival(NamedTuple):
    """A place, in bytes, in the memory that this rank receives into, which a rank will fill."""

    peer: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Delivery:
    """What an exchange of puts brings: lands in `memory` (bytes, uint8).

    recycled  whether memory will be written to again once it is released; else it lasts while it is
              referred to
    """

    memory: Tensor
    ticket: Ticket
    recycled: bool = False

    def wait(self) -> None:
        """As a Ticket's."""
        self.ticket.wait()

    def release(self) -> None:
        """Says, once, that work enqueued on the current stream from now on does not read `memory`."""


class Transport(ABC):
    """The ranks of one ring, 0 to size - 1, this one being `rank`. Tensors on `device_types` can be
    exchanged.

    All ranks must call its methods in the same order; messages between a pair of ranks arrive in
    it.
    """

    rank: int
    size: int
    device_types: frozenset[str] = frozenset({"cpu"})
    held_bytes: int = 0  # of memory that this transport keeps for deliveries
    broken: bool = False  # whether this ring is known to be of no use any more
    in_use: threading.RLock  # held by the thread that is in a call
    contested: bool = False  # whether another thread called meanwhile

    def __new__(cls, *arguments: Any, **options: Any) -> Transport:
        transport = super().__new__(cls)
        transport.in_use = threading.RLock()
        return transport

    @functools.cached_property
    def histories(self) -> MutableMapping[Transport, Any]:
        """What its users keep for it and another ring, for as long as that is there."""
        return weakref.WeakKeyDictionary()

    @abstractmethod
    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        """Starts sending each tensor of `sends` to its rank and filling each of `recvs` from its
        rank, all at once.

        Tensors are contiguous; both ends of a message have the same number of bytes. None may be
        touched before the ticket was waited for. Returns without waiting.
        """

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepares for deliveries of up to so many bytes a lane. All ranks call it alike, between
        deliveries.

        What was prepared before stays so.
        """

    def connect(self, device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepares for exchanges of tensors on `device` in which not all ranks have a part. All
        ranks call it alike.
        """

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> Delivery:
        """Starts an exchange whose messages land in `nbytes` of memory on `device`, and returns
        without waiting.

        Parcels and arrivals of a pair of ranks are in one order. On a lane (one of LANES)
        deliveries are released in the order they began, and no more than the lane's number are
        unreleased at a time.
        """
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        recvs = [(memory[a.offset : a.offset + a.nbytes], a.peer) for a in arrivals]
        ticket = self.exchange([(as_bytes(p.tensor), p.peer) for p in sends], recvs)
        return Delivery(memory, ticket)

    def all_gather(
        self, tensors: list[Tensor], shapes: Sequence[Sequence[torch.Size]]
    ) -> list[list[Tensor]]:
        """The contiguous tensors of all ranks, of one dtype, in rank order; `shapes` are those of
        all ranks.
        """
        everyone = [[tensors[0].new_empty(shape) for shape in theirs] for theirs in shapes]
        everyone[self.rank] = tensors
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(tensor, peer) for peer in others for tensor in tensors]
        self.exchange(
            sends, [(tensor, peer) for peer in others for tensor in everyone[peer]]
        ).wait()
        return everyone

    def gather(self, message: bytes) -> list[bytes]:
        """The messages of all ranks (at most MESSAGE_BYTES), in rank order.

        The host waits for them, no GPU stream does. Raises ValueError for a longer message,
        TimeoutError if a rank does not call.
        """
        if len(message) > MESSAGE_BYTES:
            raise ValueError(f"a message has {len(message)} bytes, more than {MESSAGE_BYTES}")
        return self._gather(message)

    def give_up(self, words: bytes) -> RuntimeError | None:
        """Says, with `words` of text, that this rank breaks off what all ranks had begun together.

        Ranks that wait for this one fail. Unless all ranks give up, the ring is of no use any more:
        later messages on it fail too. Returns the error of the rank that was the reason, where
        that is known to be another one.
        """
        return None

    def find_lost_rank(self) -> RuntimeError | None:
        """Return the error of a rank that is known to take no further part, None if all do."""
        return None

    def leave(self, words: bytes) -> None:  # noqa: B027 - as give_up
        """As `give_up`, without waiting for whether others do too: the ring is of no use from now
        on.
        """

    def note_enqueued(self, doing: str) -> None:  # noqa: B027 - nothing to watch here
        """Says that this rank has enqueued all of what it was `doing` with the others on its
        device.
        """

    def _gather(self, message: bytes) -> list[bytes]:
        """As `gather`; here for transports that exchange CPU tensors."""
        head = len(message).to_bytes(4, "little")
        mine = torch.frombuffer(
            bytearray((head + message).ljust(MESSAGE_BYTES + len(head), b"\0")), dtype=torch.uint8
        )
        replies = [
            bytes(reply.tolist()) for [reply] in self.all_gather([mine], [[mine.shape]] * self.size)
        ]
        return [
            reply[len(head) :][: int.from_bytes(reply[: len(head)], "little")] for reply in replies
        ]


def make_late_error(peers: Sequence[int], seconds: float) -> RankLate:
    """Return the error of a rank that waited so long for `peers`, one of which did not come."""
    return RankLate(f"{name_ranks(peers)} of the group did not make this call within {seconds:g} s")


def name_ranks(peers: Sequence[int]) -> str:
    """Name one of `peers`, as far as it is known which one."""
    return f"rank {' or '.join(map(str, peers))}"


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor's memory as (bytes,) uint8. A view would mind the strides of dimensions
    of one entry.
    """
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class Alone(Transport):
    """A ring of one. There is one such, ALONE, which a copy is too."""

    rank, size = 0, 1

    def __reduce__(self) -> str:
        return "ALONE"

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        assert not sends and not recvs, "a ring of one rank has nobody to exchange with"
        return Done()

    def _gather(self, message: bytes) -> list[bytes]:
        return [message]


ALONE = Alone()


class Done:
    """The ticket of an exchange that is over."""

    def wait(self) -> None:
        """There is nothing to wait for."""
