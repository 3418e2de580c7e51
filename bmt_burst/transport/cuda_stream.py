"""CUDA streams that wait for flags and write them, for deliveries by copy engines.

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

_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
# CU_STREAM_MEM_OP_WAIT_VALUE_32 (as flags are 0: until greater or equal), ..._WRITE_VALUE_32
_WAIT, _WRITE = 1, 2


class CudaStream:
    """A CUDA stream. Operations that the driver refuses raise RuntimeError."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        driver = _driver()
        places = [(to.data_ptr(), of.data_ptr(), of.nbytes) for to, of in copies if of.nbytes]
        # The driver has it since CUDA 12.8.
        if len(places) > 1 and hasattr(driver, "cuMemcpyBatchAsync"):
            _copy_together(places, self.stream.cuda_stream)
        else:
            for place in places:
                status = driver.cuMemcpyDtoDAsync_v2(*place, self.stream.cuda_stream)
                _check(status, "cuMemcpyDtoDAsync")

    def write(self, flags: Sequence[Tensor], value: int) -> None:
        self._operate_on(_WRITE, flags, value)

    def wait(self, flags: Sequence[Tensor], value: int) -> None:
        self._operate_on(_WAIT, flags, value)

    def record(self) -> torch.cuda.Event:
        # A new event each time: one that is recorded again would mean later work to those who wait
        # for it from then on.
        return self.stream.record_event()

    def follow(self, event: torch.cuda.Event) -> None:
        self.stream.wait_event(event)

    def _operate_on(self, operation: int, flags: Sequence[Tensor], value: int) -> None:
        """Write or wait for flags, at most 255 of them."""
        if not flags:
            return
        value %= 1 << 32  # compared as a cyclic number: -1 is less than 0
        operations = (_Operation * len(flags))(
            *(_Operation(operation, flag.data_ptr(), value) for flag in flags)
        )
        handle = ctypes.c_void_p(self.stream.cuda_stream)
        status = _driver().cuStreamBatchMemOp_v2(handle, len(flags), operations, 0)
        _check(status, "cuStreamBatchMemOp")


class CudaStreams:
    """The streams of the GPU that is current when this object is made."""

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self.thread = _Thread()

    def make(self) -> CudaStream:
        """Make a new stream. Copies of a GPU to itself are kernels: without a higher priority they
        would wait until all blocks of the kernel that is running have begun.
        """
        return CudaStream(torch.cuda.Stream(self.index, priority=-1))

    def current(self) -> CudaStream:
        """Return the stream that computes."""
        if not self.thread.has_context:
            torch.cuda.Event().record()  # CUDA makes the context of the GPU the thread's own
            self.thread.has_context = True
        return CudaStream(torch.cuda.current_stream(self.index))


class _Thread(threading.local):
    """Facts about the current thread. The driver's functions need a context, which new threads of
    autograd do not have.
    """

    has_context = False


def _copy_together(places: Sequence[tuple[int, int, int]], stream: int) -> None:
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
