"""CUDA streams as the driver's functions see them, for deliveries by copy engines.

Short sequences need many small operations, and the host's time for each of them is what counts. So
nothing here goes through torch's streams and events.

Layouts of structures, and the functions, are those of CUDA's driver API.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .regions import ByteCopy

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_ANY_DEVICE = 4  # CU_MEMORYTYPE_UNIFIED
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


class Launch(NamedTuple):
    """A copy: a function of the driver and its arguments, of which the addresses are set each
    time.
    """

    function: Callable[[Any, ctypes.c_void_p], int]
    arguments: Any
    passed: Any  # the arguments as the function takes them
    target: int
    target_at: int
    source: int
    source_at: int


class Launches(NamedTuple):
    """Copies of a delivery.

    together  the copies of contiguous bytes, if the driver can make several in one call
    single    the others
    """

    together: _Together | None
    single: list[Launch]


class CudaStream:
    """A CUDA stream, by its handle. `events` are those of its context.

    Operations that the driver refuses raise RuntimeError.
    """

    def __init__(self, handle: int, events: CudaEvents, owner: torch.cuda.Stream | None = None):
        self.handle, self.events, self.owner = ctypes.c_void_p(handle), events, owner
        driver = _driver()
        self._operate = driver.cuStreamBatchMemOp_v2
        self._record, self._wait = driver.cuEventRecord, driver.cuStreamWaitEvent

    def copy(self, copies: Launches, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        there, here = [x.data_ptr() for x in targets], [x.data_ptr() for x in sources]
        stream = self.handle
        if copies.together is not None:
            copies.together.launch(there, here, stream)
        for function, arguments, passed, target, target_at, source, source_at in copies.single:
            arguments.target = there[target] + target_at
            arguments.source = here[source] + source_at
            status = function(passed, stream)
            if status:
                _check(status, f"a copy of {copies}")

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


def make_launches(copies: Sequence[ByteCopy]) -> Launches:
    """Return copies as `CudaStream.copy` takes them."""
    contiguous = [copy for copy in copies if not copy.axes]
    # The driver has it since CUDA 12.8.
    if len(contiguous) < 2 or not hasattr(_driver(), "cuMemcpyBatchAsync"):
        return Launches(None, [_make_launch(copy) for copy in copies])
    return Launches(_Together(contiguous), [_make_launch(copy) for copy in copies if copy.axes])


class _Together:
    """Copies of contiguous bytes in one call of the driver. They may be made in any order.

    On two H200 eight copies to a peer took the host 18 us in one call, and 63 us in eight calls.
    They arrived after 54 us instead of 116.
    """

    def __init__(self, copies: Sequence[ByteCopy]):
        self.copy, self.count = _driver().cuMemcpyBatchAsync, len(copies)
        self.ends = [
            [(copy.target, copy.target_at) for copy in copies],
            [(copy.source, copy.source_at) for copy in copies],
        ]
        self.targets, self.sources = ((ctypes.c_uint64 * self.count)() for _ in self.ends)
        self.sizes = (ctypes.c_size_t * self.count)(*(copy.nbytes for copy in copies))
        self.attributes = (_Attributes * 1)(_Attributes(order=_IN_STREAM_ORDER))
        self.first_with_attributes = (ctypes.c_size_t * 1)(0)
        self.failed = (ctypes.c_size_t * 1)()

    def launch(self, there: list[int], here: list[int], stream: ctypes.c_void_p) -> None:
        """Copy from tensors at the addresses `here` to tensors at the addresses `there`."""
        into, of = self.ends
        self.targets[:] = [there[number] + at for number, at in into]
        self.sources[:] = [here[number] + at for number, at in of]
        status = self.copy(
            self.targets,
            self.sources,
            self.sizes,
            self.count,
            self.attributes,
            self.first_with_attributes,
            1,
            self.failed,
            stream,
        )
        if status:
            first = self.failed[0]  # beyond all copies if none of them is to blame
            size = f", number {first} of {self.sizes[first]} bytes" if first < self.count else ""
            _check(status, f"{self.count} copies together{size}")


def _make_launch(copy: ByteCopy) -> Launch:
    """Return a copy by the simplest function that can do it."""
    target, target_at, source, source_at, nbytes, axes = copy
    arguments: Any
    passed: Any
    function: Callable[[Any, ctypes.c_void_p], int]
    if len(axes) == 2:
        arguments, function = _make_layers(nbytes, *axes), _driver().cuMemcpy3DAsync_v2
        passed = ctypes.byref(arguments)
    elif axes:
        arguments, function = _make_rows(nbytes, *axes), _driver().cuMemcpy2DAsync_v2
        passed = ctypes.byref(arguments)
    else:
        arguments = passed = _BytesCopy(nbytes)
        function = functools.partial(_copy_bytes, _driver().cuMemcpyDtoDAsync_v2)
    return Launch(function, arguments, passed, target, target_at, source, source_at)


@dataclass(slots=True)
class _BytesCopy:
    """A copy of contiguous bytes."""

    nbytes: int
    target: int = 0
    source: int = 0


def _copy_bytes(call: Callable[..., int], copy: _BytesCopy, stream: ctypes.c_void_p) -> int:
    return call(copy.target, copy.source, copy.nbytes, stream)


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes. Without hints the driver finds the places of memory itself."""

    _fields_: ClassVar = [
        ("order", ctypes.c_uint32),
        ("source_hint", ctypes.c_uint32 * 2),
        ("target_hint", ctypes.c_uint32 * 2),
        ("flags", ctypes.c_uint32),
    ]


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_: ClassVar = [
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
    ]


def _make_rows(nbytes: int, rows: tuple[int, int, int]) -> _RowsCopy:
    count, target_pitch, source_pitch = rows
    return _RowsCopy(
        source_type=_ANY_DEVICE,
        source_pitch=source_pitch,
        target_type=_ANY_DEVICE,
        target_pitch=target_pitch,
        nbytes=nbytes,
        rows=count,
    )


class _LayersCopy(ctypes.Structure):
    """CUDA_MEMCPY3D. The distance of layers is a number of rows: `source_rows`, `target_rows`."""

    _fields_: ClassVar = [
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_z", ctypes.c_size_t),
        ("source_level", ctypes.c_size_t),
        ("source_type", ctypes.c_uint32),
        ("source_on_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_reserved", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("source_rows", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_z", ctypes.c_size_t),
        ("target_level", ctypes.c_size_t),
        ("target_type", ctypes.c_uint32),
        ("target_on_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_reserved", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("target_rows", ctypes.c_size_t),
        ("nbytes", ctypes.c_size_t),
        ("rows", ctypes.c_size_t),
        ("layers", ctypes.c_size_t),
    ]


def _make_layers(
    nbytes: int, layers: tuple[int, int, int], rows: tuple[int, int, int]
) -> _LayersCopy:
    return _LayersCopy(
        source_type=_ANY_DEVICE,
        source_pitch=rows[2],
        source_rows=layers[2] // rows[2],
        target_type=_ANY_DEVICE,
        target_pitch=rows[1],
        target_rows=layers[1] // rows[1],
        nbytes=nbytes,
        rows=rows[0],
        layers=layers[0],
    )


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
