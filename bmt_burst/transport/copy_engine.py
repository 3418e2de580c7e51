"""Deliveries by the GPUs' copy engines, between the ranks of one host: bytes move while every SM computes.

Each rank has an arena that its peers can write to (torch's symmetric memory). For each lane it holds slots, which
deliveries take in turn, and flags. Delivery n of a lane:

    sender      waits until the receiver has read delivery n - slots (its own flag `freed`), copies each parcel to its
                place in the receiver's slot, then writes n to the receiver's flag `arrived`; on a stream of its own
    receiver    `wait` lets the current stream wait for `arrived` of those that it expects parcels from;
                `release` lets it write n to everyone's flag `freed`

Streams wait and write, by the driver's stream memory operations; the host never does, and no kernel spins. A stream
that waits may hold back others that share its hardware queue, so the order in which the host enqueues must do on a
single queue: what a rank waits for, its peers enqueue before they wait for anything later. The ring's order has that
property: deliveries begin before what they overlap with is computed, and slots are released as soon as they are read.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import LANES, Arrival, Delivery, Parcel, Transport

logger = logging.getLogger("bmt_burst")

_FLAG_BYTES = 128  # flags are this far apart
_SLOT_BYTES = 1 << 21  # slots are a multiple of this, so that growing by little does not mean a new arena


class Stream(Protocol):
    """A queue of work on this rank's device; flags are int32 tensors of one entry, here or on a peer."""

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

    stream    makes a new stream
    current   the stream that computes
    allocate  makes so many bytes that peers can write to; returns every rank's, in rank order. All ranks call it.
    settle    the host waits until all ranks are here and all that they enqueued is done
    """

    stream: Callable[[], Stream]
    current: Callable[[], Stream]
    allocate: Callable[[int], list[Tensor]]
    settle: Callable[[], None]


class CopyEngines:
    """Deliveries between `size` ranks of a host, this one being `rank`."""

    def __init__(self, rank: int, size: int, device: Device):
        self.rank, self.size, self.device = rank, size, device
        self.slot_bytes = dict.fromkeys(LANES, 0)
        self.lanes: dict[str, _Lane] = {}
        self.arena_bytes = 0

    def fits(self, lane_bytes: Mapping[str, int]) -> bool:
        """Whether there is room for deliveries of so many bytes."""
        return bool(self.lanes) and all(lane_bytes[lane] <= self.slot_bytes[lane] for lane in LANES)

    def reserve(self, lane_bytes: Mapping[str, int]) -> None:
        """Makes an arena in place of one that is too small. All ranks call it alike, between deliveries."""
        self.device.settle()
        self.lanes.clear()  # with them the old arena goes
        for lane in LANES:
            self.slot_bytes[lane] = max(-(-lane_bytes[lane] // _SLOT_BYTES) * _SLOT_BYTES, self.slot_bytes[lane])
        flags = 2 * self.size * _FLAG_BYTES
        self.arena_bytes = sum(slots * self.slot_bytes[lane] + flags for lane, slots in LANES.items())
        arenas = self.device.allocate(self.arena_bytes)
        arenas[self.rank].zero_()
        self.device.settle()
        start = 0
        for lane, slots in LANES.items():
            stop = start + slots * self.slot_bytes[lane] + flags
            parts = [arena[start:stop] for arena in arenas]
            self.lanes[lane] = _Lane(self.rank, parts, slots, self.slot_bytes[lane], self.device)
            start = stop

    def deliver(self, lane: str, nbytes: int, sends: Sequence[Parcel], arrivals: Sequence[Arrival]) -> Delivery:
        """As Transport.deliver."""
        return self.lanes[lane].deliver(nbytes, sends, sorted({arrival.peer for arrival in arrivals}))


class _Lane:
    """One kind of deliveries: its slots and flags in every rank's arena, and the stream that fills the peers'.

    `parts` are the lane's bytes in the arenas: slots, then for each rank the flags "arrived" and "freed".
    """

    def __init__(self, rank: int, parts: list[Tensor], slots: int, slot_bytes: int, device: Device):
        self.rank, self.parts, self.slots, self.slot_bytes, self.device = rank, parts, slots, slot_bytes, device
        self.stream = device.stream()
        self.number = 0
        peers = range(len(parts))
        self.arrived = [self._flag(rank, 2 * peer) for peer in peers]  # here, written by peer
        self.freed = [self._flag(rank, 2 * peer + 1) for peer in peers]
        self.arrived_there = [self._flag(peer, 2 * rank) for peer in peers]  # there, written by this rank
        self.freed_there = [self._flag(peer, 2 * rank + 1) for peer in peers if peer != rank]

    def deliver(self, nbytes: int, sends: Sequence[Parcel], sources: list[int]) -> Delivery:
        assert nbytes <= self.slot_bytes, f"{nbytes} bytes are for a slot of {self.slot_bytes}"
        self.number += 1
        start = self.number % self.slots * self.slot_bytes
        self.stream.follow(self.device.current().record())  # by then the parcels are ready
        for peer in dict.fromkeys(parcel.peer for parcel in sends):
            self.stream.wait([self.freed[peer]], self.number - self.slots)
            for tensor, _, offset in (parcel for parcel in sends if parcel.peer == peer):
                source = tensor.view(-1).view(torch.uint8)
                at = start + offset
                self.stream.copy(self.parts[peer][at : at + source.numel()], source)
            self.stream.write([self.arrived_there[peer]], self.number)
        memory = self.parts[self.rank][start : start + nbytes]
        return _LaneDelivery(memory, _Arrivals(self, self.number, sources, self.stream.record(), sends))

    def _flag(self, owner: int, index: int) -> Tensor:
        at = self.slots * self.slot_bytes + index * _FLAG_BYTES
        return self.parts[owner][at : at + 4].view(torch.int32)


@dataclass(frozen=True)
class _Arrivals:
    """The ticket of a delivery; holds the parcels until they have left."""

    lane: _Lane
    number: int
    sources: list[int]
    departed: object
    sends: Sequence[Parcel]

    def wait(self) -> None:
        current = self.lane.device.current()
        current.wait([self.lane.arrived[peer] for peer in self.sources], self.number)
        current.follow(self.departed)


class _LaneDelivery(Delivery):
    ticket: _Arrivals

    def release(self) -> None:
        lane = self.ticket.lane
        lane.device.current().write(lane.freed_there, self.ticket.number)


class GpuTransport(Transport):
    """A transport whose deliveries between GPUs go by their copy engines where they can, and by `exchange` elsewhere.

    copy_engines  whether they do: False never, True or an error, None where all ranks are on one host and can reach
                  each other's memory
    """

    def __init__(self, copy_engines: bool | None = None):
        self.wants_copy_engines = copy_engines
        self.copy_engines: CopyEngines | None = None

    @abstractmethod
    def symmetric_memory(self, nbytes: int) -> list[Tensor]:
        """So many bytes on each rank's current GPU, as seen from here, in rank order. All ranks call it."""

    @property
    def held_bytes(self) -> int:
        return self.copy_engines.arena_bytes if self.copy_engines else 0

    def reserve(self, lane_bytes: Mapping[str, int], device: torch.device) -> None:
        """Raises RuntimeError on every rank if copy engines were asked for by name and a rank cannot use them."""
        if device.type != "cuda" or self.size == 1 or self.wants_copy_engines is False:
            return
        engines = self.copy_engines or CopyEngines(self.rank, self.size, self._device())
        if engines.fits(lane_bytes):
            return
        reason = self._several_hosts()
        if reason is None:
            reason = self._first_failure(lambda: engines.reserve(lane_bytes))
        if reason is None:
            self.copy_engines = engines
        elif self.wants_copy_engines or self.copy_engines:
            raise RuntimeError(f"copy engines cannot be used: {reason}")
        else:
            self.wants_copy_engines = False
        logger.info("deliveries go %s", f"over NCCL: {reason}" if reason else "by the GPUs' copy engines")

    def deliver(
        self, lane: str, nbytes: int, sends: Sequence[Parcel], arrivals: Sequence[Arrival], device: torch.device
    ) -> Delivery:
        if self.copy_engines and device.type == "cuda":
            return self.copy_engines.deliver(lane, nbytes, sends, arrivals)
        return super().deliver(lane, nbytes, sends, arrivals, device)

    def _device(self) -> Device:
        def settle() -> None:
            torch.cuda.synchronize()
            self.gather(b"")

        return Device(CudaStream, lambda: CudaStream(torch.cuda.current_stream()), self.symmetric_memory, settle)

    def _several_hosts(self) -> str | None:
        """A reason if the ranks are on several hosts."""
        hosts = sorted({name.decode() for name in self.gather(host_name())})
        return f"the ranks are on several hosts, {hosts}" if len(hosts) > 1 else None

    def _first_failure(self, attempt: Callable[[], None]) -> str | None:
        """Attempts on every rank; the first rank's failure, alike on all."""
        failure = ""
        try:
            attempt()
        except (RuntimeError, OSError) as caught:
            failure = f"{type(caught).__name__}: {caught}"
        replies = self.gather(failure.encode("ascii", "replace")[:400])
        return next((f"rank {rank}: {reply.decode()}" for rank, reply in enumerate(replies) if reply), None)


def host_name() -> bytes:
    """This machine's name, as NCCL tells hosts apart."""
    return (os.environ.get("NCCL_HOSTID") or platform.node()).encode("ascii", "replace")[:300]


def rendezvous(nbytes: int, group: dist.ProcessGroup | str) -> list[Tensor]:
    """Symmetric memory of the ranks of a process group, or of a group that torch's symmetric memory knows by name."""
    import torch.distributed._symmetric_memory as symmetric

    mine = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    handle = symmetric.rendezvous(mine, group)
    everyone = [handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(handle.world_size)]
    everyone[handle.rank] = mine
    return everyone


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
        batch = (_Operation * len(flags))(*(_Operation(operation, flag.data_ptr(), value) for flag in flags))
        status = _driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(self.stream.cuda_stream), len(flags), batch, 0)
        if status:
            raise RuntimeError(f"cuStreamBatchMemOp failed with CUDA error {status}")


_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32 (as flags are 0: until greater or equal), ..._WRITE_VALUE_32


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
