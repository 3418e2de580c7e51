"""CUDA's part of deliveries by copy engines: streams with flags, and memory that GPUs share.

Layouts of structures, and the functions, are those of CUDA's driver API.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

# CU_STREAM_MEM_OP_WAIT_VALUE_32 (as flags are 0: until greater or equal), ..._WRITE_VALUE_32
_WAIT, _WRITE = 1, 2


class CudaStream:
    """A CUDA stream. Operations that the driver refuses raise RuntimeError. Flags are int32 tensors
    of one entry, on this GPU or on a peer.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream, self.handle = stream, ctypes.c_void_p(stream.cuda_stream)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy memory, also of peers, which the caller keeps until the copy is done."""
        # A copy engine does it, and no kernel. Torch's copies take the host several times as long.
        memory = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        _check("cuMemcpyAsync", _driver().cuMemcpyAsync(*memory, self.handle))

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        """Set the flags once all earlier work is done and visible to all devices."""
        self._operate_on(_WRITE, flags, value)

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        """Wait until each flag is `value` or more."""
        self._operate_on(_WAIT, flags, value)

    def record(self) -> torch.cuda.Event:
        """Return an event after the work so far."""
        # a new one: an event that is recorded again means later work to those who wait for it then
        return self.stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        """Begin later work after the event."""
        self.stream.wait_event(event)

    def _operate_on(self, operation: int, flags: Sequence[Tensor], value: int) -> None:
        """Write or wait for flags, at most 255 of them."""
        if not flags:
            return
        value %= 1 << 32  # compared as a cyclic number: -1 is less than 0
        # The driver reads the array before it returns, and one thread at a time makes deliveries.
        operations = _operations(operation, *[flag.data_ptr() for flag in flags])
        for each in operations:
            each.value = value
        status = _driver().cuStreamBatchMemOp_v2(self.handle, len(flags), operations, 0)
        _check("cuStreamBatchMemOp", status)


class CudaDevice:
    """The current GPU. `find_group` returns the ranks as torch's symmetric memory takes them."""

    def __init__(self, rank: int, size: int, find_group: Callable[[], Any]):
        self.rank, self.size, self.find_group = rank, size, find_group
        self.index = torch.cuda.current_device()
        self.thread = threading.local()
        self.known: dict[int, CudaStream] = {}  # by handle

    def synchronize(self) -> None:
        """Let the host wait until all enqueued work is done."""
        torch.cuda.synchronize()

    def allocate(self, nbytes: int) -> Tensor:
        """Make memory that peers will be able to write to."""
        memory = torch._C._distributed_c10d._SymmetricMemory
        here = torch.device("cuda", self.index)
        torch.cuda.empty_cache()  # torch may keep all the memory that the driver could give
        return memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, here)

    def connect(self, mine: Tensor) -> list[Tensor]:
        """Return the memory that all ranks allocated, in rank order. All ranks call it."""
        from torch.distributed._symmetric_memory import rendezvous

        handle = rendezvous(mine, self.find_group())
        shape = tuple(mine.shape)
        everyone = [handle.get_buffer(peer, shape, torch.uint8) for peer in range(self.size)]
        everyone[self.rank] = mine
        return everyone

    def stream(self) -> CudaStream:
        # Copies of a GPU to itself are kernels: without a higher priority they would wait until all
        # blocks of the kernel that is running have begun.
        return CudaStream(torch.cuda.Stream(self.index, priority=-1))

    def current(self) -> CudaStream:
        """Return the stream that computes."""
        # The driver's functions need a context, which new threads of autograd do not have.
        if not hasattr(self.thread, "has_context"):
            torch.cuda.Event().record()  # CUDA makes the context of the GPU the thread's own
            self.thread.has_context = True
        handle = torch._C._cuda_getCurrentRawStream(self.index)
        found = self.known.get(handle)
        if found is None:
            found = self.known[handle] = CudaStream(torch.cuda.current_stream(self.index))
        return found


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes. Its members have the same head."""

    _fields_: ClassVar = [
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    ]


def _check(function: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{function} failed with CUDA error {status}")


@functools.lru_cache(maxsize=1024)
def _operations(operation: int, *addresses: int) -> ctypes.Array[_Operation]:
    """Return operations on flags. Deliveries repeat them with other values."""
    made = [_Operation(operation, address) for address in addresses]
    return (_Operation * len(made))(*made)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
