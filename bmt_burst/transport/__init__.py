"""Transports: they move bytes between the ranks of one ring. One backend a file.

torch_dist    process groups of torch.distributed: gloo on CPUs, NCCL on GPUs
bmtrain       BMTrain's NCCL communicators
processes     the base of these two. GPUs of one host write to each other with copy engines
              (copy_engine, cuda_stream).
simulator     ranks as threads of one process, for tests
imagined      one rank without others, for measurements and plans
Alone (here)  a ring of one rank, which never communicates

Each has a messenger, which carries what ranks agree on between their hosts (messenger, sockets).
`packing` says where tensors that are sent together lie in memory.

To add one, subclass `Transport` and list it in tests/conformance/test_transports.py.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .messenger import Messenger
from .watch import Watch

Messages = list[tuple[Tensor, int]]  # tensors, and the ranks to send them to or receive them from
# Kinds of deliveries. A number of each may be received before the first is released.
LANES: Final = {"visit": 2, "return": 1}


class Ticket:
    """An exchange to be waited for once, which keeps the messages' memory. This one is over."""

    def wait(self) -> None:
        """Return when the received bytes may be read and the sent ones overwritten, on CUDA by the
        current stream's later work. The host does not wait for a GPU.
        """


class Put(NamedTuple):
    """A contiguous tensor for any rank, and its place, in bytes, in the memory that receives it."""

    tensor: Tensor
    peer: int
    offset: int


class Arrival(NamedTuple):
    """A place, in bytes, in the memory that this rank receives into and rank `peer` fills."""

    peer: int
    offset: int
    nbytes: int


Puts = Sequence[Put]
Arrivals = Sequence[Arrival]


@dataclass(eq=False)
class Delivery:
    """An exchange of puts. They are received into `memory` (bytes, uint8).

    recycled  whether `memory` is written to again after its release, or lasts as long as it is used
    """

    memory: Tensor
    ticket: Ticket = field(default_factory=Ticket)
    recycled: bool = False

    def wait(self) -> None:
        """Return when `memory` may be read, on CUDA by the current stream's later work."""
        self.ticket.wait()

    def wait_for_sends(self) -> None:
        """Return when what was sent may be overwritten, on CUDA by the current stream's later work.
        The delivery no longer keeps it. Call this after `wait`, to use that memory before the
        release.
        """

    def release(self) -> None:
        """Promise, once, that the current stream's later work does not read `memory`. Then wait for
        the sends, unless that was done.
        """


class Transport(ABC):
    """The ranks of one ring, this one being `rank`. It exchanges tensors on `device_types`.

    All ranks must call its methods in the same order. Messages between a pair of ranks arrive in
    the order in which they were sent.

    messenger    carries what the ranks agree on
    begun        how many deliveries began, if they are counted
    watch        ends this process if its GPU waits for a lost rank, if there is one
    is_imagined  whether there are no other ranks (imagined.py)
    side         the side that rings send, "q" or "kv", or None if plans choose it
    """

    rank: int
    size: int
    messenger: Messenger
    device_types: frozenset[str] = frozenset({"cpu"})
    begun: int = 0
    watch: Watch | None = None
    is_imagined: bool = False
    side: str | None = None

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
        rank, all at once, without waiting.

        Tensors are contiguous. Both ends of a message have the same number of bytes. No tensor may
        be touched before the ticket was waited for.
        """

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepare for deliveries of up to these numbers of bytes on each lane, as well as earlier
        ones. All ranks call it with the same numbers, between deliveries.
        """

    def connect(self, device: torch.device) -> None:  # noqa: B027 - nothing to do here
        """Prepare, on all ranks, for exchanges of tensors on `device` without some of the ranks."""

    def mark(self, device: torch.device) -> Any:
        """Return the current stream's work so far, as `deliver` takes it."""
        return None

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Puts,
        arrivals: Arrivals,
        device: torch.device,
        ready: Any = None,
    ) -> Delivery:
        """Start an exchange that is received into `nbytes` of memory on `device`, without waiting.

        ready  a `mark` from when what is sent to others was ready, by default now

        For each pair of ranks, puts and arrivals have the same order. A rank's puts to itself have
        no arrivals. On a lane (one of LANES) deliveries are released in the order in which they
        began. At most the lane's number of them are unreleased at a time.
        """
        memory, leaving = torch.empty(nbytes, dtype=torch.uint8, device=device), []
        for tensor, peer, offset in sends:
            if peer == self.rank:
                memory[offset : offset + tensor.nbytes] = as_bytes(tensor)
            else:
                leaving.append((as_bytes(tensor), peer))
        landing = [(memory[offset : offset + nbytes], peer) for peer, offset, nbytes in arrivals]
        return Delivery(memory, self.exchange(leaving, landing))

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send parts[r], contiguous, to each rank r. Return the parts of all ranks for this one, of
        these shapes and the same dtype, in rank order.
        """
        found = [parts[self.rank].new_empty(shape) for shape in shapes]
        found[self.rank] = parts[self.rank]
        others = [peer for peer in range(self.size) if peer != self.rank]
        sends = [(parts[peer], peer) for peer in others if parts[peer].numel()]
        recvs = [(found[peer], peer) for peer in others if found[peer].numel()]
        self.exchange(sends, recvs).wait()
        return found

    def gather_equal(self, x: Tensor) -> Tensor:
        """Return the contiguous x of all ranks, of one shape, in rank order: (size, *x.shape)."""
        return torch.stack(self.all_to_all([x] * self.size, [x.shape] * self.size))

    def end_exchanges(self) -> bool:
        """Wait some seconds for exchanges that a failed call left. Return whether all ended."""
        return True

    def disconnect(self) -> None:  # noqa: B027 - nobody waits for a process
        """Make the hosts fail that wait for tensors from this rank, which has failed."""


def as_bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as (bytes,) uint8."""
    if x.dtype == torch.uint8 and x.dim() == 1:
        return x
    assert x.is_contiguous(), f"expected contiguous memory, got strides {x.stride()}"
    # a plain view would refuse some strides of dimensions of one entry
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


class Alone(Transport):
    """A ring of one rank. ALONE is the only one, also after it was copied or pickled."""

    rank, size, messenger = 0, 1, Messenger()

    def __reduce__(self) -> str:
        return "ALONE"

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        assert not sends and not recvs, "a ring of one rank has nobody to exchange with"
        return Ticket()


ALONE = Alone()
