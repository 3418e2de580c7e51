"""The transport of ranks that are threads of one process, for tests.

`bmt_burst.simulate` runs the threads. Their ring is stricter than a real network:

- A receive buffer holds NaN bytes until its exchange was waited for, and delivered memory again
  once it is released.
- A send buffer that changes in flight is an error, in a delivery until its release. So is a put
  that is not contiguous or not for the place where its receiver expects it, and a delivery while
  too many are unreleased.
- `ring.traffic` lists (peer, bytes) of every message sent.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import RankFailed
from . import LANES, Arrival, Arrivals, Delivery, Messages, Puts, Ticket, Transport, as_bytes
from .messenger import Messenger

_TIMEOUT = 60.0  # seconds; a rank that waits longer is in a deadlock
_POLL = 0.05


class Network:
    """The messages between the threads.

    failed  set once a rank has failed. The messages are then meaningless.
    ended   threads that send nothing more
    """

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.ended: set[int] = set()
        self._lock = threading.Lock()
        self._counts: Counter[Any] = Counter()
        self._queues: dict[Any, queue.SimpleQueue[Any]] = {}

    def find_queue(self, end: str, *key: Any) -> queue.SimpleQueue[Any]:
        """Return the queue of the next message with this key at one end of it, "put" or "ask". Each
        message has a queue, so that it belongs to who asked first.
        """
        with self._lock:
            self._counts[end, key] += 1
            numbered = self._counts[end, key], key
            found = self._queues.pop(numbered, None)  # the other end has made it
            if found is None:
                found = self._queues[numbered] = queue.SimpleQueue()
            return found

    def take(self, sender: int, found: queue.SimpleQueue[Any]) -> Any:
        """Wait for the message of a queue, from thread `sender`."""
        for _ in range(int(_TIMEOUT / _POLL)):
            # read before the queue, which it may have filled just before
            has_ended = sender in self.ended
            try:
                return found.get(timeout=_POLL)
            except queue.Empty:
                if self.failed.is_set():
                    raise RankFailed("another simulated rank failed") from None
                if has_ended:
                    ended = "takes no part: it has ended, or has no gradient"
                    raise RankFailed(f"simulated rank {sender} {ended}") from None
        raise RankFailed(f"no message from simulated rank {sender} within {_TIMEOUT:.0f} s")


@dataclass
class _Ticket(Ticket):
    """An exchange of rank `rank`.

    sent   the caller's tensors, and their content when the exchange began
    recvs  tensors, the ranks that fill them, and functions that wait for the content
    """

    rank: int
    sent: list[tuple[Tensor, Tensor]]
    recvs: list[tuple[Tensor, int, Callable[[], Tensor]]]

    def wait(self) -> None:
        recvs, self.recvs = self.recvs, []  # after an error the caller waits again
        for tensor, peer, take in recvs:
            message = take()
            sent, wanted = (f"{tuple(x.shape)} {x.dtype}" for x in (message, tensor))
            assert sent == wanted, (
                f"rank {self.rank} expected {wanted} from rank {peer}, got {sent}"
            )
            tensor.copy_(message)
        if not all(as_bytes(now).equal(as_bytes(then)) for now, then in self.sent):
            raise AssertionError("a send buffer was overwritten while its exchange was under way")


@dataclass(eq=False, kw_only=True)
class _GuardedDelivery(Delivery):
    """A delivery that checks how it is used.

    plain       the delivery without checks
    unreleased  the deliveries of its lane, in the order in which they began
    places      where this rank expects puts, and functions that wait for where they are put
    """

    recycled: bool = True
    plain: Delivery
    unreleased: list[Delivery]
    places: list[tuple[Arrival, Callable[[], tuple[int, int]]]]

    def wait(self) -> None:
        self.plain.wait()
        places, self.places = self.places, []
        for arrival, take in places:
            place = take()
            assert place == arrival[1:], f"expected {arrival}, got a put at {place}"

    def wait_for_sends(self) -> None:
        self.plain.ticket.wait()  # compares again what was sent, which may change from now on
        self.plain.ticket = Ticket()
        self.plain.wait_for_sends()

    def release(self) -> None:
        assert self.unreleased.pop(0) is self, (
            "deliveries of a lane are released in the order in which they began"
        )
        self.memory.fill_(0xFF)
        self.plain.release()
        self.wait_for_sends()


class SimulatedRing(Transport):
    """One rank's end of a simulated ring over `members`, thread numbers in rank order."""

    _deliver = Transport.deliver  # tests replace it by copy engines

    def __init__(self, network: Network, members: tuple[int, ...], thread: int):
        self.network, self.members = network, members
        self.rank, self.size = members.index(thread), len(members)
        self.messenger: Messenger = SimulatedMessenger(self)
        self.traffic: list[tuple[int, int]] = []
        self.reserved = dict.fromkeys(LANES, 0)
        self.unreleased: dict[str, list[Delivery]] = {lane: [] for lane in LANES}

    def subring(self, members: Iterable[int]) -> SimulatedRing:
        """Return a ring of some of this ring's ranks, this one among them."""
        threads = tuple(self.members[m] for m in members)
        return SimulatedRing(self.network, threads, self.members[self.rank])

    def put(self, peer: int, message: Any, *kind: str) -> None:
        """Send any object to a rank."""
        key = *kind, self.members, self.rank, peer
        self.network.find_queue("put", *key).put(message)

    def ask(self, peer: int, *kind: str) -> Callable[[], Any]:
        """Return a function that waits for the next object of this kind from a rank."""
        found = self.network.find_queue("ask", *kind, self.members, peer, self.rank)
        return functools.partial(self.network.take, self.members[peer], found)

    def swap(self, message: Any, kind: str) -> list[Any]:
        """Send an object to all ranks. Return theirs, in rank order."""
        for peer in range(self.size):
            self.put(peer, message, kind)
        return [self.ask(peer, kind)() for peer in range(self.size)]

    def exchange(self, sends: Messages, recvs: Messages) -> _Ticket:
        assert all(tensor.is_contiguous() for tensor, _ in [*sends, *recvs])
        sent = [(tensor, tensor.clone()) for tensor, _ in sends]
        for (_, copy), (_, peer) in zip(sent, sends, strict=True):
            self.put(peer, copy)
            self.traffic.append((peer, copy.nbytes))
        for tensor, _ in recvs:
            as_bytes(tensor).fill_(0xFF)
        return _Ticket(self.rank, sent, [(tensor, peer, self.ask(peer)) for tensor, peer in recvs])

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        self.reserved = {lane: max(lane_bytes[lane], self.reserved[lane]) for lane in LANES}
        everyone = self.swap(self.reserved, "reserve")
        is_same = all(theirs == self.reserved for theirs in everyone)
        assert is_same, f"expected ranks to reserve the same, got {everyone}"

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Puts,
        arrivals: Arrivals,
        device: torch.device,
        ready: Any = None,
    ) -> Delivery:
        unreleased = self.unreleased[lane]
        count = len(unreleased)
        assert count < LANES[lane], f"{count} deliveries of lane {lane} are unreleased"
        most = self.reserved[lane]
        assert nbytes <= most, f"{nbytes} bytes on lane {lane} exceed the reserved {most}"
        for put in sends:
            assert put.tensor.is_contiguous(), "a put must be contiguous"
            if put.peer != self.rank:
                self.put(put.peer, (put.offset, put.tensor.nbytes), "place", lane)
        plain = self._deliver(lane, nbytes, sends, arrivals, device, ready)
        places = [(arrival, self.ask(arrival.peer, "place", lane)) for arrival in arrivals]
        guarded = _GuardedDelivery(plain.memory, plain=plain, unreleased=unreleased, places=places)
        unreleased.append(guarded)
        return guarded


class SimulatedMessenger(Messenger):
    def __init__(self, ring: SimulatedRing):
        self.ring = ring

    def _gather(self, message: bytes) -> list[bytes]:
        return self.ring.swap(message, "message")
