"""Transports in one process, for tests and measurements: ranks are threads, or there is but one.

    outputs = simulate(3, lambda ring: work(ring.rank, process_group=ring))

It is stricter than a real network. A receive buffer holds NaN bytes until the exchange is waited for, and so does what
was delivered once it is released. Errors are: a send buffer that changed in flight, a parcel that is not for the place
where its receiver expects one, a delivery while too many are unreleased. It counts: `ring.traffic` lists (peer, bytes)
of every message sent.

    ring = ImaginedRing(rank=3, size=8)

is one rank alone, whose peers are imagined: it computes what it would and takes the memory it would.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from . import LANES, Arrival, Delivery, Messages, Parcel, Ticket, Transport, as_bytes

_TIMEOUT = 60.0  # seconds; a rank that waits longer is in a deadlock
_POLL = 0.05
Result = TypeVar("Result")


class Aborted(RuntimeError):
    """Another rank failed, or never sent what this one waits for."""


@dataclass
class _Network:
    """The queues between the threads; a queue per ring, source and destination."""

    queues: dict[tuple, queue.SimpleQueue] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: threading.Event = field(default_factory=threading.Event)

    def lane(self, *key) -> queue.SimpleQueue:
        with self.lock:
            return self.queues.setdefault(key, queue.SimpleQueue())

    def take(self, *key):
        lane = self.lane(*key)
        for _ in range(int(_TIMEOUT / _POLL)):
            try:
                return lane.get(timeout=_POLL)
            except queue.Empty:
                if self.failed.is_set():
                    raise Aborted("another simulated rank failed") from None
        raise Aborted(f"no message on {key} within {_TIMEOUT:.0f} s")


@dataclass
class _Inbox:
    """What comes from a peer: messages are for exchanges in the order in which these began, whichever is waited for."""

    take: Callable[[], Tensor]
    asked: int = 0
    taken: int = 0
    early: dict[int, Tensor] = field(default_factory=dict)  # taken, for exchanges that have yet to be waited for

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
    sent: list[tuple[Tensor, Tensor]]  # the caller's tensors and what they held when the exchange began
    recvs: list[tuple[Tensor, int, int]]  # tensor, peer, number of the peer's message

    def wait(self) -> None:
        for tensor, peer, number in self.recvs:
            message = self.ring.inboxes[peer].get(number)
            if (message.shape, message.dtype) != (tensor.shape, tensor.dtype):
                sent, wanted = (f"{tuple(x.shape)} {x.dtype}" for x in (message, tensor))
                raise AssertionError(f"rank {peer} sent {sent}, rank {self.ring.rank} waits for {wanted}")
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
            place = self.ring.network.take("place", self.lane, self.ring.members, arrival.peer, self.ring.rank)
            assert place == (arrival.offset, arrival.nbytes), f"{arrival} is not where its sender puts it, {place}"

    def release(self) -> None:
        assert self.unreleased.pop(0) is self, "deliveries of a lane are released in the order they began"
        self.memory.fill_(0xFF)
        self.delivery.release()


class SimulatedRing(Transport):
    """One rank's end of a simulated ring over `members`, thread numbers in rank order."""

    def __init__(self, network: _Network, members: tuple[int, ...], thread: int):
        self.network, self.members = network, members
        self.rank, self.size = members.index(thread), len(members)
        self.traffic: list[tuple[int, int]] = []
        takes = (functools.partial(network.take, members, peer, self.rank) for peer in range(self.size))
        self.inboxes = [_Inbox(take) for take in takes]
        self.reserved = dict.fromkeys(LANES, 0)
        self.unreleased: dict[str, list[Delivery]] = {lane: [] for lane in LANES}

    def subring(self, members: Iterable[int]) -> SimulatedRing:
        """A ring of some of this ring's ranks, this one among them."""
        threads = tuple(self.members[m] for m in members)
        return SimulatedRing(self.network, threads, self.members[self.rank])

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        assert all(tensor.is_contiguous() for tensor, _ in [*sends, *recvs])
        sent = [(tensor, tensor.clone()) for tensor, _ in sends]
        for (_, copy), (_, peer) in zip(sent, sends, strict=True):
            self.network.lane(self.members, self.rank, peer).put(copy)
            self.traffic.append((peer, copy.nbytes))
        for tensor, _ in recvs:
            as_bytes(tensor).fill_(0xFF)
        return _Ticket(self, sent, [(tensor, peer, self.inboxes[peer].ask()) for tensor, peer in recvs])

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        self.reserved = {lane: max(lane_bytes[lane], self.reserved[lane]) for lane in LANES}
        for peer in range(self.size):
            self.network.lane("reserve", self.members, self.rank, peer).put(self.reserved)
        for peer in range(self.size):
            theirs = self.network.take("reserve", self.members, peer, self.rank)
            assert theirs == self.reserved, f"ranks reserve unlike amounts: {self.reserved}, rank {peer} {theirs}"

    def deliver(
        self, lane: str, nbytes: int, sends: Sequence[Parcel], arrivals: Sequence[Arrival], device: torch.device
    ) -> _Delivery:
        unreleased = self.unreleased[lane]
        assert len(unreleased) < LANES[lane], f"{len(unreleased)} deliveries of lane {lane} are unreleased"
        assert nbytes <= self.reserved[lane], f"{nbytes} bytes on lane {lane}, reserved are {self.reserved[lane]}"
        for parcel in sends:
            place = self.network.lane("place", lane, self.members, self.rank, parcel.peer)
            place.put((parcel.offset, parcel.tensor.nbytes))
        delivery = self._deliver(lane, nbytes, sends, arrivals, device)
        guards = {"delivery": delivery, "lane": lane, "ring": self, "arrivals": arrivals, "unreleased": unreleased}
        unreleased.append(_Delivery(delivery.memory, delivery.ticket, recycled=True, **guards))
        return unreleased[-1]

    def _deliver(self, *arguments) -> Delivery:
        return super().deliver(*arguments)


@dataclass
class _Imagined:
    """The ticket of a delivery that nobody makes; holds the parcels as if they had to leave."""

    sends: Sequence[Parcel]

    def wait(self) -> None:
        self.sends = ()


class ImaginedRing(Transport):
    """A rank whose peers are imagined: they say what it says, and their deliveries have landed, whatever is in them.

    As with copy engines they land in slots that this rank keeps, `held_bytes`. All ranks must own as many tokens.
    """

    device_types = frozenset({"cpu", "cuda"})

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.slots: dict[str, list[Tensor]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(slot.nbytes for slots in self.slots.values() for slot in slots)

    def exchange(self, sends: Messages, recvs: Messages) -> Ticket:
        raise RuntimeError("peers that are imagined exchange nothing: they take deliveries of a single ring")

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        for lane, count in LANES.items():
            held = self.slots[lane][0].nbytes if lane in self.slots else 0
            if lane_bytes[lane] > held:
                shape = (lane_bytes[lane],)
                self.slots[lane] = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(count)]

    def deliver(
        self, lane: str, nbytes: int, sends: Sequence[Parcel], arrivals: Sequence[Arrival], device: torch.device
    ) -> Delivery:
        slots = self.slots[lane]
        slots.append(slots.pop(0))
        return Delivery(slots[0][:nbytes], _Imagined(sends), recycled=True)

    def _gather(self, message: bytes) -> list[bytes]:
        return [message] * self.size


def simulate(size: int, work: Callable[[SimulatedRing], Result]) -> list[Result]:
    """Runs `work(ring)` on `size` ranks at once; returns their results in rank order, or raises the first failure."""
    network = _Network()
    results: list = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(SimulatedRing(network, tuple(range(size)), rank))
        except BaseException as failure:  # noqa: BLE001 - raised again by the caller's thread
            failures.append(failure)
            network.failed.set()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if not isinstance(f, Aborted)), failures[0])
    return results
