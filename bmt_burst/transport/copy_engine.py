"""Deliveries by copy engines between the GPUs of one host. Bytes move while every SM computes.

Each rank has an arena that its peers can write to (torch's symmetric memory). For each lane the
arena holds slots, which deliveries use in turn, and flags. Delivery n of a lane:

    sender      waits until its receivers have read delivery n - slots (the sender's flags `freed`),
                copies each put to its place in the receiver's slot, and writes n to the receivers'
                flags `arrived`. A separate stream does this. Another one copies what the sender
                puts to itself, at the same time.
    receiver    `wait` lets the current stream wait for the flags `arrived` of the expected senders.
                `release` lets it write n to every rank's flag `freed`, and then wait until its own
                puts of delivery n have left.

Streams wait and write with the driver's stream memory operations. The host never waits, and no
kernel spins. Before a rank waits for a later event, it enqueues all that its peers wait for: see
"Why streams do not deadlock" in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import LANES, Arrivals, Delivery, Puts
from .cuda_stream import CudaDevice, CudaStream

_FLAG_BYTES = 128  # flags are this far apart
# slots are a multiple of this, so that a little growth needs no new arena
_SLOT_BYTES = 1 << 21


class CopyEngines:
    """Deliveries between the ranks of a host, from this rank's device."""

    def __init__(self, device: CudaDevice):
        self.device, self.size = device, device.size
        self.slot_bytes = dict.fromkeys(LANES, 0)
        self.lanes: dict[str, _Lane] = {}
        self.arena = torch.empty(0, dtype=torch.uint8)

    def fits(self, lane_bytes: Mapping[str, int]) -> bool:
        return bool(self.lanes) and all(lane_bytes[lane] <= self.slot_bytes[lane] for lane in LANES)

    def growth(self, lane_bytes: Mapping[str, int]) -> list[Callable[[], None]]:
        """Return steps that replace the arena by one with room for `lane_bytes`.

        A rank takes a step, between deliveries, once all ranks have taken the previous one. After a
        step that failed on any rank, these engines are unusable.
        """
        needed = {lane: -(-lane_bytes[lane] // _SLOT_BYTES) * _SLOT_BYTES for lane in LANES}
        slot_bytes = {lane: max(needed[lane], self.slot_bytes[lane]) for lane in LANES}
        sizes = [LANES[lane] * slot_bytes[lane] + 2 * self.size * _FLAG_BYTES for lane in LANES]

        def allocate() -> None:
            self.lanes.clear()
            with torch.inference_mode(False):
                self.arena = torch.empty(0, dtype=torch.uint8)  # free the old one first
                self.arena = self.device.allocate(sum(sizes))
                self.arena.zero_()
            self.device.synchronize()

        def connect() -> None:
            with torch.inference_mode(False):
                arenas, start = self.device.connect(self.arena), 0
                for lane, size in zip(LANES, sizes, strict=True):
                    parts = [arena[start : start + size] for arena in arenas]
                    self.lanes[lane] = _Lane(parts, LANES[lane], slot_bytes[lane], self.device)
                    start += size
            self.slot_bytes = slot_bytes

        def try_out() -> None:
            for lane in self.lanes.values():
                lane.try_out()
            self.device.synchronize()

        return [self.device.synchronize, allocate, connect, try_out]

    def deliver(
        self,
        lane: str,
        nbytes: int,
        sends: Puts,
        arrivals: Arrivals,
        ready: torch.cuda.Event | None = None,
    ) -> Delivery:
        """Deliver as Transport.deliver does."""
        sources = sorted({each.peer for each in arrivals})
        return self.lanes[lane].deliver(nbytes, sends, sources, ready)


class _Lane:
    """One kind of deliveries: its slots and flags in every rank's arena, and its streams.

    `parts` are the lane's bytes in the arenas: slots, then each rank's flags "arrived" and "freed".
    """

    def __init__(self, parts: list[Tensor], slots: int, slot_bytes: int, device: CudaDevice):
        self.parts, self.slot_bytes, self.device = parts, slot_bytes, device
        self.rank = rank = device.rank
        self.slots = [  # by slot, then by rank
            [part[slot * slot_bytes : (slot + 1) * slot_bytes] for part in parts]
            for slot in range(slots)
        ]
        self.streams = device.stream(), device.stream()
        self.number = 0
        self.released: torch.cuda.Event | None = None  # after the last release
        peers = range(len(parts))
        self.arrived = [self._flag(rank, 2 * peer) for peer in peers]  # here, written by peer
        self.freed = [self._flag(rank, 2 * peer + 1) for peer in peers]
        # there, written by this rank
        self.arrived_there = [self._flag(peer, 2 * rank) for peer in peers]
        self.freed_there = [self._flag(peer, 2 * rank + 1) for peer in peers]

    def deliver(
        self, nbytes: int, sends: Puts, sources: Sequence[int], ready: torch.cuda.Event | None
    ) -> Delivery:
        assert nbytes <= self.slot_bytes, f"{nbytes} bytes do not fit a slot of {self.slot_bytes}"
        self.number += 1
        slot = self.slots[self.number % len(self.slots)]
        current = self.device.current()
        if self.released:
            current.follow(self.released)
        now = current.record()  # by then all puts are ready, and the own slot was read
        others, own = ([p for p in sends if (p.peer == self.rank) == x] for x in (False, True))
        # What others receive need not wait until this rank has computed what it computes now.
        left = self._send(self.streams[0], slot, others, ready or now) if others else None
        kept = self._send(self.streams[1], slot, own, now) if own else None
        flags = [self.arrived[peer] for peer in sources]
        number, memory = self.number, slot[self.rank][:nbytes]
        return _LaneDelivery(
            memory, lane=self, number=number, flags=flags, left=left, kept=kept, sends=sends
        )

    def _send(
        self, stream: CudaStream, slot: Sequence[Tensor], sends: Puts, ready: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Copy puts to the ranks' memory for this delivery. Return an event after that."""
        # The next rank first: where copies follow one another, each rank receives from another one.
        sends = sorted(sends, key=lambda put: (put.peer - self.rank) % len(self.parts))
        peers = [peer for peer in dict.fromkeys(put.peer for put in sends) if peer != self.rank]
        stream.follow(ready)
        stream.wait([self.freed[peer] for peer in peers], self.number - len(self.slots))
        for tensor, peer, offset in sends:
            nbytes = tensor.nbytes
            assert tensor.is_contiguous(), f"expected contiguous memory, got {tensor.stride()}"
            assert offset + nbytes <= self.slot_bytes, "a put ends beyond its slot"
            stream.copy(slot[peer].data_ptr() + offset, tensor.data_ptr(), nbytes)
        stream.write([self.arrived_there[peer] for peer in peers], self.number)
        return stream.record()

    def release(self, number: int) -> None:
        """Report to all ranks that the current stream has read deliveries up to `number`."""
        current = self.device.current()
        if self.released:
            current.follow(self.released)  # another stream may have read that delivery
        current.write(self.freed_there, number)
        self.released = current.record()

    def try_out(self) -> None:
        """Do once what deliveries do, so that a device that refuses it does so now."""
        # Slots hold zeros and flags 0 until now. Only the own flag becomes 1, and no rank waits
        # for what it puts to itself.
        stream, _ = self.streams
        stream.write([self.arrived[self.rank]], 1)
        stream.wait([self.arrived[self.rank]], 1)
        self.device.current().follow(stream.record())
        for peer in range(len(self.parts)):
            if self.slot_bytes:
                there, here = self.slots[0][peer], self.slots[-1][self.rank]
                stream.copy(there.data_ptr(), here.data_ptr(), 4)
            stream.write([self.arrived_there[peer]], int(peer == self.rank))

    def _flag(self, owner: int, index: int) -> Tensor:
        at = len(self.slots) * self.slot_bytes + index * _FLAG_BYTES
        return self.parts[owner][at : at + 4].view(torch.int32)


@dataclass(eq=False, kw_only=True)
class _LaneDelivery(Delivery):
    """Delivery `number` of a lane.

    flags  those of the expected senders
    left   the event after the puts to others, if there are any. A receiver that is late with
           another delivery delays it, so `wait` does not wait for it.
    kept   the event after the puts to this rank
    """

    lane: _Lane
    number: int
    flags: Sequence[Tensor]
    left: torch.cuda.Event | None
    kept: torch.cuda.Event | None
    sends: Puts
    recycled: bool = True

    def wait(self) -> None:
        current = self.lane.device.current()
        current.wait(self.flags, self.number)
        if self.kept:
            current.follow(self.kept)

    def wait_for_sends(self) -> None:
        if self.left:
            self.lane.device.current().follow(self.left)
        self.left, self.sends = None, ()

    def release(self) -> None:
        self.lane.release(self.number)
        self.wait_for_sends()
