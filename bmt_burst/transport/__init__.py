"""Transports: they move bytes between the ranks of one ring. One backend a file.

torch_dist    process groups of torch.distributed: gloo on CPUs, NCCL on GPUs
bmtrain       BMTrain's NCCL communicators
processes     the base of these two. Ranks of one host exchange messages through shared memory
              (host_memory), and their GPUs write to each other with copy engines (copy_engine,
              cuda_stream).
simulator     ranks as threads of one process, for tests
Alone (here)  a ring of one rank, which never communicates

`packing` says where tensors that are sent together lie in memory.

To add one, subclass `Transport` and list it in tests/conformance/test_transports.py.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..errors import RankLate

Messages = list[tuple[Tensor, int]]  # tensors, and the ranks to send them to or receive them from
# Seconds to wait for a rank that does not make a call, over a group without a timeout of its own.
# init_sequence_parallel takes another number.
DEFAULT_TIMEOUT: Final = 120.0
MESSAGE_BYTES: Final = 4096  # the longest message that `gather` carries
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
    """A contiguous tensor for a rank, this one or another, and its place: bytes from the start of
    the memory that the rank receives into.
    """

    tensor: Tensor
    peer: int
    offset: int


class Arrival(NamedTuple):
    """A place, in bytes, in the memory that this rank receives into. Rank `peer` fills it."""

    peer: int
    offset: int
    nbytes: int


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


class Transport(ABC):
    """The ranks of one ring, 0 to size - 1. This one is `rank`.

    It exchanges tensors on `device_types`. All ranks must call its methods in the same order.
    Messages between a pair of ranks arrive in the order in which they were sent.
    """

    rank: int
    size: int
    device_types: frozenset[str] = frozenset({"cpu"})
    in_use: threading.RLock  # held by the thread that makes a call
    contested: bool = False  # whether another thread made a call at the same time

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        transport = super().__new__(cls)
        transport.in_use = threading.RLock()
        return transport

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that this transport keeps for deliveries."""
        return 0

    @property
    def broken(self) -> bool:
        """Whether this ring is known to be unusable."""
        return False

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
        for tensor, peer, offset in sends:
            if peer == self.rank:
                memory[offset : offset + tensor.nbytes] = as_bytes(tensor)
        leaving = [(as_bytes(put.tensor), put.peer) for put in sends if put.peer != self.rank]
        landing = [(memory[offset : offset + nbytes], peer) for peer, offset, nbytes in arrivals]
        return Delivery(memory, self.exchange(leaving, landing))

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

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in rank order.

        The host waits for them, no GPU stream does. Raises ValueError for more than MESSAGE_BYTES
        bytes, RankLate if a rank does not call.
        """
        if len(message) > MESSAGE_BYTES:
            raise ValueError(
                f"expected a message of at most {MESSAGE_BYTES} bytes, got one of {len(message)}"
            )
        return self._gather(message)

    def set_timeout(self, seconds: float | None) -> None:  # noqa: B027 - nothing to wait for here
        """Set how many seconds this rank waits for other ranks. None: the group's own timeout."""

    def give_up(self, words: bytes) -> RuntimeError | None:
        """Report, with `words` of text, that this rank breaks off a call that all ranks had begun.

        Ranks that wait for this one fail. The ring is unusable afterwards, and later messages on it
        fail, unless all ranks give up after as many deliveries. Return the error of the rank that
        caused it, if that is known to be another one.
        """
        return None

    def find_lost_rank(self) -> RuntimeError | None:
        """Return the error of a rank that is known to take no further part, if any."""
        return None

    def leave(self, words: bytes) -> None:  # noqa: B027 - as give_up
        """Give up without waiting whether others do too. The ring is unusable from now on."""

    def note_enqueued(self, doing: str) -> None:  # noqa: B027 - nothing to watch here
        """Note that this rank has enqueued on its device everything it was `doing` with the
        others.
        """

    def _gather(self, message: bytes) -> list[bytes]:
        """Gather messages as CPU tensors, for transports that exchange those."""
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
    """Return the error of a rank that waited `seconds` for one of `peers` in vain."""
    return RankLate(f"{name_ranks(peers)} of the group did not make this call within {seconds:g} s")


def name_ranks(peers: Sequence[int]) -> str:
    """Name the rank that is one of `peers`."""
    return f"rank {' or '.join(map(str, peers))}"


def as_bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as (bytes,) uint8.

    A plain view would refuse some strides of dimensions of one entry.
    """
    assert x.is_contiguous(), f"expected contiguous memory, got strides {x.stride()}"
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class Alone(Transport):
    """A ring of one rank. ALONE is the only one, also after it was copied or pickled."""

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
        """Return at once."""
