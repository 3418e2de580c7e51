"""Transports in one process, for tests and measurements: ranks are threads, or there is but one.

`bmt_burst.simulate` runs the threads. Their ring is stricter than a real network. A receive buffer
holds NaN bytes until the exchange is waited for, and so does what was delivered once it is
released. Errors are: a send buffer that changed in flight, a put that is not contiguous or not
for the place where its receiver expects one, a delivery while
too many are unreleased. It counts: `ring.traffic` lists (peer, bytes) of every message sent.

    ring = ImaginedRing(rank=3, size=8)

is one rank alone, whose peers are imagined: it computes what it would and takes the memory it
would.
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

_TIMEOUT = 60.0  # seconds; a rank that waits longer is in a deadlock
_POLL = 0.05


class Aborted(RankFailed):
    """Another rank failed, or never sent what this one waits for."""


@dataclass
class Network:
    """The queues between the threads; a queue per ring, source and destination.

    failed  set once a rank has failed; what is in the queues is then worth nothing
    ended   threads that send nothing more
    """

    queues: dict[tuple, queue.SimpleQueue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: threading.Event = field(default_factory=threading.Event)
    ended: set[int] = field(default_factory=set)

    def lane(self, *key) -> queue.SimpleQueue:
        with self.lock:
            return self.queues.setdefault(key, queue.SimpleQueue())

    def take(self, sender: int, *key):
        """What thread `sender` has put into a queue."""
        lane = self.lane(*key)
        for _ in range(int(_TIMEOUT / _POLL)):
            # looked up before the queue, which it may have filled just before
            has_ended = sender in self.ended
            try:
                return lane.get(timeout=_POLL)
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
    """What comes from a peer: messages are for exchanges in the order in which these began,
    whichever is waited for.
    """

    take: Callable[[], Tensor]
    asked: int = 0
    taken: int = 0
    # taken, for exchanges that have yet to be waited for
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
    # the caller's tensors and what they held when the exchange began
    sent: list[tuple[Tensor, Tensor]]
    recvs: list[tuple[Tensor, int, int]]  # tensor, peer, number of the peer's message

    def wait(self) -> None:
        for tensor, peer, number in self.recvs:
            message = self.ring.inboxes[peer].get(number)
            if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
                sent, wanted = (f"{tuple(x.shape)} {x.dtype}" for x in (message, tensor))
                raise AssertionError(
                    f"rank {peer} sent {sent}, rank {self.ring.rank} waits for {wanted}"
                )
            tensor.copy_(message)
        if not all(as_bytes(now).equal(as_bytes(then)) for now, then in self.sent):
            raise AssertionError("a send buffer was overwritten while its exchange was under way")


@dataclass(frozen=True, kw_only=True)
class _Delivery(Delivery):
    delivery: Delivery
    lane: str
    ring: SimulatedRing
    arrivals: Sequence[Arrival]
    unreleased: list[Delivery]

    def wait(self) -> None:
        self.delivery.wait()
        for arrival in self.arrivals:
            place = self.ring.take(arrival.peer, "place", self.lane)
            assert place == (arrival.offset, arrival.nbytes), (
                f"{arrival} is not where its sender puts it, {place}"
            )

    def release(self) -> None:
        assert self.unreleased.pop(0) is self, (
            "deliveries of a lane are released in the order they began"
        )
        self.memory.fill_(0xFF)
        self.delivery.release()


class SimulatedRing(Transport):
    """One rank's end of a simulated ring over `members`, thread numbers in rank order."""

    def __init__(self, network: Network, members: tuple[int, ...], thread: int):
        self.network, self.members = network, members
        self.rank, self.size = members.index(thread), len(members)
        self.traffic: list[tuple[int, int]] = []
        self.inboxes = [_Inbox(functools.partial(self.take, peer)) for peer in range(self.size)]
        self.reserved = dict.fromkeys(LANES, 0)
        self.unreleased: dict[str, list[Delivery]] = {lane: [] for lane in LANES}

    def subring(self, members: Iterable[int]) -> SimulatedRing:
        """A ring of some of this ring's ranks, this one among them."""
        threads = tuple(self.members[m] for m in members)
        return SimulatedRing(self.network, threads, self.members[self.rank])

    def put(self, peer: int, message: Any, *kind: str) -> None:
        self.network.lane(*kind, self.members, self.rank, peer).put(message)

    def take(self, peer: int, *kind: str) -> Any:
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
                f"ranks reserve unlike amounts: {self.reserved}, rank {peer} {theirs}"
            )

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Sequence[Put],
        arrivals: Sequence[Arrival],
        device: torch.device,
    ) -> _Delivery:
        unreleased = self.unreleased[lane]
        assert len(unreleased) < LANES[lane], (
            f"{len(unreleased)} deliveries of lane {lane} are unreleased"
        )
        assert nbytes <= self.reserved[lane], (
            f"{nbytes} bytes on lane {lane}, reserved are {self.reserved[lane]}"
        )
        for put in sends:
            assert put.tensor.is_contiguous(), "a put's bytes are taken as they lie"
            self.put(put.peer, (put.offset, put.tensor.nbytes), "place", lane)
        delivery = self._deliver(lane, nbytes, sends, arrivals, device)
        guards = {
            "delivery": delivery,
            "lane": lane,
            "ring": self,
            "arrivals": arrivals,
            "unreleased": unreleased,
        }
        unreleased.append(_Delivery(delivery.memory, delivery.ticket, recycled=True, **guards))
        return unreleased[-1]

    def _deliver(self, *arguments) -> Delivery:
        return super().deliver(*arguments)


@dataclass
class _Imagined:
    """The ticket of a delivery that nobody makes; holds the puts as if they had to leave."""

    sends: Sequence[Put]

    def wait(self) -> None:
        self.sends = ()


class ImaginedRing(Transport):
    """A rank whose peers are imagined: they say what it says, and their deliveries have landed,
    whatever is in them.

    As with copy engines they land in slots that this rank keeps, `held_bytes`. All ranks must own
    as many tokens.
    """

    device_types = frozenset({"cpu", "cuda"})

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.slots: dict[str, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(slot.nbytes for slots in self.slots.values() for slot in slots)

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        raise RuntimeError(
            "peers that are imagined exchange nothing: they take deliveries of a single ring"
        )

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

    def _gather(self, message: bytes) -> list[bytes]:
        return [message] * self.size
