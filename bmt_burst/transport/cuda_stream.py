"""CUDA streams as the driver's functions see them, for deliveries by copy engines.

Short sequences need many small operations, and the host's time for each of them is what counts. So
nothing here goes through torch's streams and events.

Layouts of structures, and the functions, are those of CUDA's driver API.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
# CU_STREAM_MEM_OP_WAIT_VALUE_32 (as flags are 0: until greater or equal), ..._WRITE_VALUE_32
_WAIT, _WRITE = 1, 2


class CudaEvents:
    """CUDA events that are used again. Waiting streams are not affected by that, because they wait
    for the work that an event had recorded when their wait was enqueued.
    """

    def __init__(self) -> None:
        self.free: list[ctypes.c_void_p] = []

    def take(self) -> CudaEvent:
        """Return an event that no other object holds."""
        if self.free:
            return CudaEvent(self.free.pop(), self.free)
        handle = ctypes.c_void_p()
        _check(_driver().cuEventCreate(ctypes.byref(handle), _NO_TIMING), "cuEventCreate")
        return CudaEvent(handle, self.free)


class CudaEvent:
    """An event after some work of a stream. It is used again once nobody holds this object."""

    __slots__ = ("free", "handle")

    def __init__(self, handle: ctypes.c_void_p, free: list[ctypes.c_void_p]):
        self.handle, self.free = handle, free

    def __del__(self) -> None:
        self.free.append(self.handle)


class CudaStream:
    """A CUDA stream, by its handle. `events` are those of its context.

    Operations that the driver refuses raise RuntimeError.
    """

    def __init__(self, handle: int, events: CudaEvents, owner: torch.cuda.Stream | None = None):
        self.handle, self.events, self.owner = ctypes.c_void_p(handle), events, owner
        driver = _driver()
        self._operate = driver.cuStreamBatchMemOp_v2
        self._record, self._wait = driver.cuEventRecord, driver.cuStreamWaitEvent

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        driver = _driver()
        places = [(to.data_ptr(), of.data_ptr(), of.nbytes) for to, of in copies if of.nbytes]
        # The driver has it since CUDA 12.8.
        if len(places) > 1 and hasattr(driver, "cuMemcpyBatchAsync"):
            _copy_together(places, self.handle)
        else:
            for place in places:
                _check(driver.cuMemcpyDtoDAsync_v2(*place, self.handle), "cuMemcpyDtoDAsync")

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        self._operate_on(_WRITE, flags, value)

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        self._operate_on(_WAIT, flags, value)

    def record(self) -> CudaEvent:
        event = self.events.take()
        _check(self._record(event.handle, self.handle), "cuEventRecord")
        return event

    def follow(self, event: CudaEvent) -> None:
        _check(self._wait(self.handle, event.handle, 0), "cuStreamWaitEvent")

    def _operate_on(self, operation: int, flags: Sequence[Tensor], value: int) -> None:
        """Write or wait for flags, at most 255 of them."""
        if not flags:
            return
        value %= 1 << 32  # compared as a cyclic number: -1 is less than 0
        operations = (_Operation * len(flags))(
            *(_Operation(operation, flag.data_ptr(), value) for flag in flags)
        )
        _check(self._operate(self.handle, len(flags), operations, 0), "cuStreamBatchMemOp")


class CudaStreams:
    """The streams of the GPU that is current when this object is made."""

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self.events = CudaEvents()
        self.known: dict[int, CudaStream] = {}  # by handle, which is all that matters of a stream
        self.thread = _Thread()
        self._find_handle = torch._C._cuda_getCurrentRawStream

    def make(self) -> CudaStream:
        """Make a new stream. Copies of a GPU to itself are kernels: without a higher priority they
        would wait until all blocks of the kernel that is running have begun.
        """
        owner = torch.cuda.Stream(self.index, priority=-1)
        return CudaStream(owner.cuda_stream, self.events, owner)

    def current(self) -> CudaStream:
        """Return the stream that computes."""
        if not self.thread.has_context:
            torch.cuda.Event().record()  # CUDA makes the context of the GPU the thread's own
            self.thread.has_context = True
        handle = self._find_handle(self.index)
        found = self.known.get(handle)
        if found is None:
            found = self.known[handle] = CudaStream(handle, self.events)
        return found


class _Thread(threading.local):
    """Facts about the current thread. The driver's functions need a context, which new threads of
    autograd do not have.
    """

    has_context = False


def _copy_together(places: Sequence[tuple[int, int, int]], stream: ctypes.c_void_p) -> None:
    """Make copies (target, source, bytes) in one call of the driver, in any order.

    On two H200 eight copies to a peer took the host 18 us in one call, and 63 us in eight calls.
    They arrived after 54 us instead of 116.
    """
    count = len(places)
    targets, sources, sizes = zip(*places, strict=True)
    attributes = (_Attributes * 1)(_Attributes(order=_IN_STREAM_ORDER))
    first_with_attributes, failed = (ctypes.c_size_t * 1)(0), (ctypes.c_size_t * 1)()
    status = _driver().cuMemcpyBatchAsync(
        (ctypes.c_uint64 * count)(*targets),
        (ctypes.c_uint64 * count)(*sources),
        (ctypes.c_size_t * count)(*sizes),
        count,
        attributes,
        first_with_attributes,
        1,
        failed,
        stream,
    )
    if status:
        first = failed[0]  # beyond all copies if none of them is to blame
        size = f", number {first} of {sizes[first]} bytes" if first < count else ""
        _check(status, f"{count} copies together{size}")


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Without hints the driver finds the places of memory itself."""

    _fields_: ClassVar = [
        ("order", ctypes.c_uint32),
        ("source_hint", ctypes.c_uint32 * 2),
        ("target_hint", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    ]


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


def _check(status: int, what: str) -> None:
    """Raise RuntimeError if the driver refused something."""
    if status:
        raise RuntimeError(f"{what} failed with CUDA error {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    # other functions take pointers as objects of ctypes, and small integers
    driver.cuMemcpyDtoDAsync_v2.argtypes = [
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ]
    if hasattr(driver, "cuMemcpyBatchAsync"):
        driver.cuMemcpyBatchAsync.argtypes = [
            *[ctypes.c_void_p] * 3,
            ctypes.c_size_t,
            *[ctypes.c_void_p] * 2,
            ctypes.c_size_t,
            *[ctypes.c_void_p] * 2,
        ]
    return driver
