"""Deliveries by the GPUs' copy engines, between the ranks of one host: bytes move while every SM
computes.

Each rank has an arena that its peers can write to (torch's symmetric memory). For each lane it
holds slots, which deliveries take in turn, and flags. Delivery n of a lane:

    sender      waits until the receiver has read delivery n - slots (its own flag `freed`), copies
                each put to its place in the receiver's slot, then writes n to the receiver's
                flag `arrived`; on a stream of its own
    receiver    `wait` lets the current stream wait for `arrived` of those that it expects puts
                from; `release` lets it write n to everyone's flag `freed`

Streams wait and write, by the driver's stream memory operations; the host never does, and no kernel
spins. A stream that waits may hold back others that share its hardware queue, so the order in which
the host enqueues must do on a
single queue: what a rank waits for, its peers enqueue before they wait for anything later. The
ring's order has that
property: deliveries begin before what they overlap with is computed, and slots are released as soon
as they are read.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import LANES, Arrival, Delivery, Put, as_bytes

_FLAG_BYTES = 128  # flags are this far apart
# slots are a multiple of this, so that growing by little does not mean a new arena
_SLOT_BYTES = 1 << 21


class Stream(Protocol):
    """A queue of work on this rank's device; flags are int32 tensors of one entry, here or on a
    peer.
    """

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Contiguous uint8 tensors of one size."""

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        """After all work before it is done and visible to all devices."""

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        """Until each flag is `value` or more."""

    def record(self) -> object:
        """An event after the work so far."""

    def follow(self, event: object) -> None:
        """Later work begins after the event."""


@dataclass(frozen=True)
class Device:
    """What deliveries need from a device.

    stream       makes a new stream
    current      the stream that computes
    synchronize  the host waits until all that was enqueued is done
    allocate     makes so many bytes that peers will be able to write to
    connect      takes what `allocate` made and returns every rank's, in rank order; all ranks call
                 it
    """

    stream: Callable[[], Stream]
    current: Callable[[], Stream]
    synchronize: Callable[[], None]
    allocate: Callable[[int], Tensor]
    connect: Callable[[Tensor], list[Tensor]]


class CopyEngines:
    """Deliveries between `size` ranks of a host, this one being `rank`."""

    def __init__(self, rank: int, size: int, device: Device):
        self.rank, self.size, self.device = rank, size, device
        self.slot_bytes = dict.fromkeys(LANES, 0)
        self.lanes: dict[str, _Lane] = {}
        self.arena: Tensor | None = None

    @property
    def arena_bytes(self) -> int:
        return 0 if self.arena is None else self.arena.numel()

    def fits(self, lane_bytes: Mapping[str, int]) -> bool:
        """Whether there is room for deliveries of so many bytes."""
        return bool(self.lanes) and all(lane_bytes[lane] <= self.slot_bytes[lane] for lane in LANES)

    def growth(self, lane_bytes: Mapping[str, int]) -> list[Callable[[], None]]:
        """Steps that make an arena with room for so many bytes in place of the present one.

        All ranks take them alike, between deliveries; none takes a step before all have taken the
        one before, or any
        step after one that failed on any rank: then these engines cannot be used any more.
        """
        needed = {lane: -(-lane_bytes[lane] // _SLOT_BYTES) * _SLOT_BYTES for lane in LANES}
        slot_bytes = {lane: max(needed[lane], self.slot_bytes[lane]) for lane in LANES}

        def allocate() -> None:
            self.lanes.clear()
            self.arena = None
            with torch.inference_mode(False):
                self.arena = self.device.allocate(
                    sum(_lane_bytes(lane, slot_bytes[lane], self.size) for lane in LANES)
                )
                self.arena.zero_()
            self.device.synchronize()

        def connect() -> None:
            start = 0
            with torch.inference_mode(False):
                arenas = self.device.connect(self.arena)
                for lane, slots in LANES.items():
                    stop = start + _lane_bytes(lane, slot_bytes[lane], self.size)
                    parts = [arena[start:stop] for arena in arenas]
                    self.lanes[lane] = _Lane(self.rank, parts, slots, slot_bytes[lane], self.device)
                    start = stop
            self.slot_bytes = slot_bytes

        def try_out() -> None:
            for lane in self.lanes.values():
                lane.try_out()
            self.device.synchronize()

        return [self.device.synchronize, allocate, connect, try_out]

    def deliver(
        self, lane: str, nbytes: int, sends: Sequence[Put], arrivals: Sequence[Arrival]
    ) -> Delivery:
        """As Transport.deliver."""
        return self.lanes[lane].deliver(
            nbytes, sends, sorted({arrival.peer for arrival in arrivals})
        )


class _Lane:
    """One kind of deliveries: its slots and flags in every rank's arena, and the stream that fills
    the peers'.

    `parts` are the lane's bytes in the arenas: slots, then for each rank the flags "arrived" and
    "freed".
    """

    def __init__(self, rank: int, parts: list[Tensor], slots: int, slot_bytes: int, device: Device):
        self.rank, self.parts, self.slots, self.slot_bytes, self.device = (
            rank,
            parts,
            slots,
            slot_bytes,
            device,
        )
        self.stream = device.stream()
        self.number = 0
        self.released = None  # event of the last release
        peers = range(len(parts))
        self.arrived = [self._flag(rank, 2 * peer) for peer in peers]  # here, written by peer
        self.freed = [self._flag(rank, 2 * peer + 1) for peer in peers]
        # there, written by this rank
        self.arrived_there = [self._flag(peer, 2 * rank) for peer in peers]
        self.freed_there = [self._flag(peer, 2 * rank + 1) for peer in peers if peer != rank]

    def deliver(self, nbytes: int, sends: Sequence[Put], sources: list[int]) -> Delivery:
        assert nbytes <= self.slot_bytes, f"{nbytes} bytes are for a slot of {self.slot_bytes}"
        self.number += 1
        start = self.number % self.slots * self.slot_bytes
        self.stream.follow(self.device.current().record())  # by then the puts are ready
        for peer in dict.fromkeys(put.peer for put in sends):
            self.stream.wait([self.freed[peer]], self.number - self.slots)
            for tensor, _, offset in (put for put in sends if put.peer == peer):
                source = as_bytes(tensor)
                at = start + offset
                self.stream.copy(self.parts[peer][at : at + source.numel()], source)
            self.stream.write([self.arrived_there[peer]], self.number)
        memory = self.parts[self.rank][start : start + nbytes]
        return _LaneDelivery(
            memory, _Arrivals(self, self.number, sources, self.stream.record(), sends)
        )

    def release(self, number: int) -> None:
        """Says to all that delivery `number`, and so all before it, has been read by the current
        stream.
        """
        current = self.device.current()
        if self.released:
            current.follow(self.released)  # which another stream may have read
        current.write(self.freed_there, number)
        self.released = current.record()

    def try_out(self) -> None:
        """Does once what deliveries do, so that a device that refuses says so now; changes nothing."""
        self.stream.write([self.arrived[self.rank]], 1)
        self.stream.wait([self.arrived[self.rank]], 1)
        for peer, part in enumerate(self.parts):
            if self.slot_bytes:
                self.stream.copy(part[self.rank : self.rank + 1], self.parts[self.rank][:1])
            self.stream.write([self.arrived_there[peer]], int(peer == self.rank))

    def _flag(self, owner: int, index: int) -> Tensor:
        at = self.slots * self.slot_bytes + index * _FLAG_BYTES
        return self.parts[owner][at : at + 4].view(torch.int32)


@dataclass
class _Arrivals:
    """The ticket of a delivery."""

    lane: _Lane
    number: int
    sources: list[int]
    departed: object
    sends: Sequence[Put]

    def wait(self) -> None:
        current = self.lane.device.current()
        current.wait([self.lane.arrived[peer] for peer in self.sources], self.number)
        current.follow(self.departed)
        self.sends = ()


@dataclass(frozen=True)
class _LaneDelivery(Delivery):
    ticket: _Arrivals
    recycled: bool = True

    def release(self) -> None:
        self.ticket.lane.release(self.ticket.number)


def _lane_bytes(lane: str, slot_bytes: int, size: int) -> int:
    """Bytes of a lane's part of an arena: slots, and two flags a rank."""
    return LANES[lane] * slot_bytes + 2 * size * _FLAG_BYTES


class CudaStream:
    """A CUDA stream, by default a new one. Raises RuntimeError if the driver refuses an operation."""

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.stream = stream or torch.cuda.Stream()

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        self._memory_operations(_WRITE, flags, value)

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        self._memory_operations(_WAIT, flags, value)

    def record(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def _memory_operations(self, operation: int, flags: Sequence[Tensor], value: int) -> None:
        if not flags:
            return
        value %= 1 << 32  # compared as a cyclic number: -1 is less than 0
        batch = (_Operation * len(flags))(
            *(_Operation(operation, flag.data_ptr(), value) for flag in flags)
        )
        status = _driver().cuStreamBatchMemOp_v2(
            ctypes.c_void_p(self.stream.cuda_stream), len(flags), batch, 0
        )
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA error {status}")


# CU_STREAM_MEM_OP_WAIT_VALUE_32 (as flags are 0: until greater or equal), ..._WRITE_VALUE_32
_WAIT, _WRITE = 1, 2


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of CUDA's driver API: a union whose members begin alike, 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
