"""Transports in one process, for tests and measurements. Ranks are threads, or one rank has
imagined peers.

`bmt_burst.simulate` runs the threads. Their ring is stricter than a real network:

- A receive buffer holds NaN bytes until its exchange was waited for. Delivered memory holds them
  again once it is released.
- A send buffer that changes in flight is an error. So is a put that is not contiguous or not for
  the place where its receiver expects it, and a delivery while too many are unreleased.
- `ring.traffic` lists (peer, bytes) of every message sent.

    ring = ImaginedRing(rank=3, size=8)

is one rank alone with imagined peers. It computes and takes memory as a real rank does.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import RankFailed
from . import LANES, Arrival, Delivery, Messages, Put, Ticket, Transport, as_bytes
from .messenger import Echo, Messenger

_TIMEOUT = 60.0  # seconds; a rank that waits longer is in a deadlock
_POLL = 0.05


class Aborted(RankFailed):
    """Another simulated rank failed, or never sent a message that this one waits for."""


@dataclass
class Network:
    """The queues between the threads: one for each ring, source and destination.

    failed  set once a rank has failed. The queues are then meaningless.
    ended   threads that send nothing more
    """

    queues: dict[tuple[Any, ...], queue.SimpleQueue[Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: threading.Event = field(default_factory=threading.Event)
    ended: set[int] = field(default_factory=set)

    def find_queue(self, *key: Any) -> queue.SimpleQueue[Any]:
        with self.lock:
            return self.queues.setdefault(key, queue.SimpleQueue())

    def take(self, sender: int, *key: Any) -> Any:
        """Take the next entry that thread `sender` puts into a queue."""
        found = self.find_queue(*key)
        for _ in range(int(_TIMEOUT / _POLL)):
            # looked up before the queue, which it may have filled just before
            has_ended = sender in self.ended
            try:
                return found.get(timeout=_POLL)
            except queue.Empty:
                if self.failed.is_set():
                    raise Aborted("another simulated rank failed") from None
                if has_ended:
                    raise Aborted(
                        f"simulated rank {sender} takes no part: it has ended, or has no gradient"
                    ) from None
        raise Aborted(f"no message on {key} within {_TIMEOUT:.0f} s")


@dataclass
class _Inbox:
    """The messages from a peer. Message n belongs to exchange n, whatever order they are waited for
    in.
    """

    take: Callable[[], Tensor]
    asked: int = 0
    taken: int = 0
    # messages that were taken for exchanges that are waited for later
    early: dict[int, Tensor] = field(default_factory=dict)

    def ask(self) -> int:
        self.asked += 1
        return self.asked

    def get(self, number: int) -> Tensor:
        while number not in self.early:
            self.taken += 1
            self.early[self.taken] = self.take()
        return self.early.pop(number)


@dataclass
class _Ticket:
    ring: SimulatedRing
    # the caller's tensors, and their content when the exchange began
    sent: list[tuple[Tensor, Tensor]]
    recvs: list[tuple[Tensor, int, int]]  # tensor, peer, number of the peer's message

    def wait(self) -> None:
        for tensor, peer, number in self.recvs:
            message = self.ring.inboxes[peer].get(number)
            if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
                sent, wanted = (f"{tuple(x.shape)} {x.dtype}" for x in (message, tensor))
                raise AssertionError(
                    f"rank {self.ring.rank} expected {wanted} from rank {peer}, got {sent}"
                )
            tensor.copy_(message)
        if not all(as_bytes(now).equal(as_bytes(then)) for now, then in self.sent):
            raise AssertionError("a send buffer was overwritten while its exchange was under way")


@dataclass(frozen=True, kw_only=True)
class GuardedDelivery(Delivery):
    """A delivery that checks how it is used."""

    delivery: Delivery
    lane: str
    ring: SimulatedRing
    arrivals: Sequence[Arrival]
    unreleased: list[Delivery]

    def wait(self) -> None:
        self.delivery.wait()
        self._check_places()

    def release(self) -> None:
        self._check_order()
        self.memory.fill_(0xFF)
        self.delivery.release()

    def _check_places(self) -> None:
        """Check that senders put everything where this rank expects it."""
        for arrival in self.arrivals:
            place = self.ring.take(arrival.peer, "place", self.lane)
            assert place == arrival[1:], f"expected {arrival}, got a put at {place}"

    def _check_order(self) -> None:
        assert self.unreleased.pop(0) is self, (
            "deliveries of a lane are released in the order in which they began"
        )


class SimulatedRing(Transport):
    """One rank's end of a simulated ring over `members`, thread numbers in rank order."""

    guard = GuardedDelivery

    def __init__(self, network: Network, members: tuple[int, ...], thread: int):
        self.network, self.members = network, members
        self.rank, self.size = members.index(thread), len(members)
        self.messenger: Messenger = SimulatedMessenger(self)
        self.traffic: list[tuple[int, int]] = []
        self.inboxes = [_Inbox(functools.partial(self.take, peer)) for peer in range(self.size)]
        self.reserved = dict.fromkeys(LANES, 0)
        self.unreleased: dict[str, list[Delivery]] = {lane: [] for lane in LANES}

    def subring(self, members: Iterable[int]) -> SimulatedRing:
        """Return a ring of some of this ring's ranks, this one among them."""
        threads = tuple(self.members[m] for m in members)
        return SimulatedRing(self.network, threads, self.members[self.rank])

    def put(self, peer: int, message: Any, *kind: str) -> None:
        """Send any object to a rank."""
        self.network.find_queue(*kind, self.members, self.rank, peer).put(message)

    def take(self, peer: int, *kind: str) -> Any:
        """Receive the next object of this kind from a rank."""
        return self.network.take(self.members[peer], *kind, self.members, peer, self.rank)

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        assert all(tensor.is_contiguous() for tensor, _ in [*sends, *recvs])
        sent = [(tensor, tensor.clone()) for tensor, _ in sends]
        for (_, copy), (_, peer) in zip(sent, sends, strict=True):
            self.put(peer, copy)
            self.traffic.append((peer, copy.nbytes))
        for tensor, _ in recvs:
            as_bytes(tensor).fill_(0xFF)
        return _Ticket(
            self, sent, [(tensor, peer, self.inboxes[peer].ask()) for tensor, peer in recvs]
        )

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        self.reserved = {lane: max(lane_bytes[lane], self.reserved[lane]) for lane in LANES}
        for peer in range(self.size):
            self.put(peer, self.reserved, "reserve")
        for peer in range(self.size):
            theirs = self.take(peer, "reserve")
            assert theirs == self.reserved, (
                f"expected rank {peer} to reserve {self.reserved}, got {theirs}"
            )

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> GuardedDelivery:
        unreleased = self.unreleased[lane]
        assert len(unreleased) < LANES[lane], (
            f"{len(unreleased)} deliveries of lane {lane} are unreleased"
        )
        assert nbytes <= self.reserved[lane], (
            f"{nbytes} bytes on lane {lane} exceed the reserved {self.reserved[lane]}"
        )
        for put in sends:
            assert put.tensor.is_contiguous(), "a put must be contiguous"
            if put.peer != self.rank:
                self.put(put.peer, (put.offset, put.tensor.nbytes), "place", lane)
        delivery = self._deliver(lane, nbytes, sends, arrivals, device)
        guarded = self.guard(
            delivery.memory,
            delivery.ticket,
            recycled=True,
            delivery=delivery,
            lane=lane,
            ring=self,
            arrivals=arrivals,
            unreleased=unreleased,
        )
        unreleased.append(guarded)
        return guarded

    def _deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> Delivery:
        delivery = super().deliver(lane, nbytes, sends, arrivals, device)
        for _, offset, nbytes in arrivals:
            delivery.memory[offset : offset + nbytes].fill_(0xFF)
        return delivery


class SimulatedMessenger(Messenger):
    """The messages of a simulated ring."""

    def __init__(self, ring: SimulatedRing):
        self.ring = ring

    def _gather(self, message: bytes) -> list[bytes]:
        peers = range(self.ring.size)
        for peer in peers:
            self.ring.put(peer, message, "message")
        return [self.ring.take(peer, "message") for peer in peers]


@dataclass
class _Imagined:
    """The ticket of an imagined delivery. It holds the tensors as if they were sent."""

    sent: Sequence[Put]

    def wait(self) -> None:
        self.sent = ()


class ImaginedRing(Transport):
    """A rank with imagined peers. They answer every message with the same one, and their deliveries
    have arrived at once with any content.

    As with copy engines, deliveries use slots that this rank keeps, `held_bytes`. All ranks must
    own equally many tokens.
    """

    device_types = frozenset({"cpu", "cuda"})

    def __init__(self, rank: int, size: int):
        self.rank, self.size, self.messenger = rank, size, Echo(size)
        self.slots: dict[str, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(slot.nbytes for slots in self.slots.values() for slot in slots)

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        raise RuntimeError("imagined peers exchange nothing: expected deliveries of a single ring")

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        for lane, count in LANES.items():
            held = self.slots[lane][0].nbytes if lane in self.slots else 0
            if lane_bytes[lane] > held:
                shape = (lane_bytes[lane],)
                self.slots[lane] = [
                    torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(count)
                ]

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> Delivery:
        slots = self.slots[lane]
        slots.append(slots.pop(0))
        return Delivery(slots[0][:nbytes], _Imagined(sends), recycled=True)
