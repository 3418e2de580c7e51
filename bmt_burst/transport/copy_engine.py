"""Deliveries by the GPUs' copy engines, between the ranks of one host. Bytes move while every SM
computes.

Each rank has an arena that its peers can write to (torch's symmetric memory). For each lane the
arena holds slots, which deliveries use in turn, and flags. Delivery n of a lane:

    sender      waits until the receiver has read delivery n - slots (the sender's flag `freed`),
                copies each put to its place in the receiver's slot, and writes n to the receiver's
                flag `arrived`. A separate stream does this. Puts to itself come last.
    receiver    `wait` lets the current stream wait for the flags `arrived` of the expected senders.
                `release` lets it write n to every rank's flag `freed`. Or `unload` lets another
                separate stream wait, copy to tensors and write.

Streams wait and write with the driver's stream memory operations. The host never waits, and no
kernel spins. A stream that waits may block others that share its hardware queue. So the order in
which the host enqueues must also work on a single queue: before a rank waits for a later event, it
enqueues all that its peers wait for. The ring's order has that property. Deliveries begin before
the computation that they overlap with, and slots are released as soon as they are read.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from . import LANES, Arrival, Delivery, Put

_FLAG_BYTES = 128  # flags are this far apart
_MOST_PLACES = 1 << 12  # views of arenas that are kept
# slots are a multiple of this, so that a little growth needs no new arena
_SLOT_BYTES = 1 << 21


Event: TypeAlias = Any  # of the device's own kind


class Stream(Protocol):
    """A queue of work on this rank's device. Flags are int32 tensors of one entry, on this rank or
    on a peer.
    """

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make copies (target, source) between tensors of one shape and dtype. The entries of a
        row, x[i], are contiguous.
        """

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        """Set the flags once all earlier work is done and visible to all devices."""

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        """Wait until each flag is `value` or more."""

    def record(self) -> Event:
        """Return an event after the work so far."""

    def follow(self, event: Event) -> None:
        """Begin later work after the event."""


@dataclass(frozen=True)
class Device:
    """The operations of a device that deliveries need.

    stream       makes a new stream
    current      returns the stream that computes
    synchronize  lets the host wait until all enqueued work is done
    allocate     makes a number of bytes that peers will be able to write to
    connect      takes the result of `allocate` and returns every rank's, in rank order. All ranks
                 call it.
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
        self.arena = torch.empty(0, dtype=torch.uint8)

    @property
    def arena_bytes(self) -> int:
        return self.arena.numel()

    def fits(self, lane_bytes: Mapping[str, int]) -> bool:
        """Whether deliveries of `lane_bytes` fit."""
        return bool(self.lanes) and all(lane_bytes[lane] <= self.slot_bytes[lane] for lane in LANES)

    def growth(self, lane_bytes: Mapping[str, int]) -> list[Callable[[], None]]:
        """Return steps that replace the arena by one with room for `lane_bytes`.

        All ranks take the same steps, between deliveries. A rank takes a step once all ranks have
        taken the previous one. After a step that failed on any rank, no rank takes another one, and
        these engines are unusable.
        """
        needed = {lane: -(-lane_bytes[lane] // _SLOT_BYTES) * _SLOT_BYTES for lane in LANES}
        slot_bytes = {lane: max(needed[lane], self.slot_bytes[lane]) for lane in LANES}

        def allocate() -> None:
            self.lanes.clear()
            with torch.inference_mode(False):
                self.arena = torch.empty(0, dtype=torch.uint8)  # free the old one first
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
        """Deliver as Transport.deliver does."""
        return self.lanes[lane].deliver(
            nbytes, sends, sorted({arrival.peer for arrival in arrivals})
        )


class _Lane:
    """One kind of deliveries: its slots and flags in every rank's arena, the stream that fills the
    peers' slots, and the one that unloads this rank's.

    `parts` are the lane's bytes in the arenas: slots, then the flags "arrived" and "freed" of each
    rank.
    """

    def __init__(self, rank: int, parts: list[Tensor], slots: int, slot_bytes: int, device: Device):
        self.rank, self.parts, self.device = rank, parts, device
        self.slots, self.slot_bytes = slots, slot_bytes
        self.stream, self.unloading = device.stream(), device.stream()
        self.places: dict[Any, Tensor] = {}  # of puts, which calls repeat
        self.number = 0
        self.releases: list[Event] = []  # the event of the last release, if there was one
        peers = range(len(parts))
        self.arrived = [self._flag(rank, 2 * peer) for peer in peers]  # here, written by peer
        self.freed = [self._flag(rank, 2 * peer + 1) for peer in peers]
        # there, written by this rank
        self.arrived_there = [self._flag(peer, 2 * rank) for peer in peers]
        self.freed_there = [self._flag(peer, 2 * rank + 1) for peer in peers if peer != rank]

    def deliver(self, nbytes: int, sends: Sequence[Put], sources: list[int]) -> Delivery:
        assert nbytes <= self.slot_bytes, f"{nbytes} bytes do not fit a slot of {self.slot_bytes}"
        self.number += 1
        start = self.number % self.slots * self.slot_bytes
        began = self.device.current().record()
        self.stream.follow(began)  # by then the puts are ready
        peers = dict.fromkeys([put.peer for put in sends])
        for peer in peers:
            if peer != self.rank:
                self.stream.wait([self.freed[peer]], self.number - self.slots)
                self._copy_puts(sends, peer, start)
                self.stream.write([self.arrived_there[peer]], self.number)
        if self.rank in peers:
            for event in self.releases:
                self.stream.follow(event)  # by then this rank has read the slot
            self._copy_puts(sends, self.rank, start)
        memory = self.parts[self.rank][start : start + nbytes]
        departed = self.stream.record()
        return _LaneDelivery(memory, _Arrivals(self, self.number, sources, began, departed, sends))

    def release(self, number: int, stream: Stream | None = None) -> None:
        """Report to all ranks that a stream, by default the current one, has read delivery `number`
        and all earlier ones.
        """
        stream = stream or self.device.current()
        for event in self.releases:
            stream.follow(event)  # another stream may have read that delivery
        stream.write(self.freed_there, number)
        self.releases = [stream.record()]

    def unload(
        self,
        number: int,
        sources: Sequence[int],
        began: Event,
        copies: Sequence[tuple[Tensor, Tensor]],
    ) -> Event:
        """Copy from delivery `number` and release it, beside the current stream. Return an event
        after that.
        """
        stream = self.unloading
        stream.follow(began)
        stream.wait([self.arrived[peer] for peer in sources], number)
        stream.copy(copies)
        self.release(number, stream)
        return self.releases[0]

    def _copy_puts(self, sends: Sequence[Put], peer: int, start: int) -> None:
        """Copy the puts for a rank into its slot, which begins at byte `start`."""
        copies = []
        for x, to, offset, pitch in sends:
            if to == peer:
                key = peer, start + offset, pitch, x.shape, x.dtype
                if key not in self.places:
                    if len(self.places) == _MOST_PLACES:
                        self.places.clear()
                    self.places[key] = self._place(*key)
                copies.append((self.places[key], x))
        self.stream.copy(copies)

    def _place(
        self, peer: int, at: int, pitch: int, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Return the memory of a put, which begins at byte `at` of a rank's part."""
        part, size = self.parts[peer], dtype.itemsize
        if not pitch:
            return part[at : at + shape.numel() * size].view(dtype).view(shape)
        # the entries of a row are contiguous
        row = [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
        first = (part.storage_offset() + at) // size
        return part.view(dtype).as_strided(shape, (pitch // size, *row), first)

    def try_out(self) -> None:
        """Do once what deliveries do, so that a device that refuses it does so now. Nothing
        changes.
        """
        self.stream.write([self.arrived[self.rank]], 1)
        self.stream.wait([self.arrived[self.rank]], 1)
        own = self.parts[self.rank]
        for peer, part in enumerate(self.parts):
            if self.slot_bytes:
                there, here = (x[: 4 * len(self.parts)].view(2, -1) for x in (part, own))
                rows = there[:, self.rank : self.rank + 1], here[:, self.rank : self.rank + 1]
                self.stream.copy([(part[self.rank : self.rank + 1], own[:1]), rows])
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
    began: Event
    departed: Event
    sends: Sequence[Put]

    def wait(self) -> None:
        current = self.lane.device.current()
        current.wait([self.lane.arrived[peer] for peer in self.sources], self.number)
        self._leave(current)

    def unload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        current = self.lane.device.current()
        current.follow(self.lane.unload(self.number, self.sources, self.began, copies))
        self._leave(current)

    def _leave(self, current: Stream) -> None:
        """Let the current stream write to what was sent."""
        current.follow(self.departed)
        self.sends = ()


@dataclass(frozen=True)
class _LaneDelivery(Delivery):
    ticket: _Arrivals
    recycled: bool = True

    def release(self) -> None:
        self.ticket.lane.release(self.ticket.number)

    def unload(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.ticket.unload(copies)


def _lane_bytes(lane: str, slot_bytes: int, size: int) -> int:
    """Return the bytes of a lane's part of an arena: slots, and two flags a rank."""
    return LANES[lane] * slot_bytes + 2 * size * _FLAG_BYTES


class CudaStream:
    """A CUDA stream, by default a new one.

    Operations that the driver refuses raise RuntimeError.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None):
        self.stream = stream or torch.cuda.Stream()

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self.stream):
            for target, source in copies:
                if target.is_contiguous() and source.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:
                    self._copy_rows(target, source)

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        self._memory_operations(_WRITE, flags, value)

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        self._memory_operations(_WAIT, flags, value)

    def record(self) -> torch.cuda.Event:
        return self.stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def _copy_rows(self, target: Tensor, source: Tensor) -> None:
        """Copy rows by a copy engine. torch would start a kernel."""
        rows, size = len(source), source.element_size()
        nbytes = source.nbytes // rows
        copy = _RowsCopy(
            source_type=_ANY_DEVICE,
            source=source.data_ptr(),
            source_pitch=source.stride(0) * size if rows > 1 else nbytes,
            target_type=_ANY_DEVICE,
            target=target.data_ptr(),
            target_pitch=target.stride(0) * size if rows > 1 else nbytes,
            nbytes=nbytes,
            rows=rows,
        )
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        status = _driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream)
        if status:
            raise RuntimeError(f"cuMemcpy2DAsync failed with CUDA error {status}")

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
    """CUstreamBatchMemOpParams of CUDA's driver API: a union of 48 bytes. Its members have the same
    head.
    """

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


_ANY_DEVICE = 4  # CU_MEMORYTYPE_UNIFIED


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D of CUDA's driver API."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_uint32),
        ("source_on_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_uint32),
        ("target_on_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
