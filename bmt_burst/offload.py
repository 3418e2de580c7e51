"""Offloading: tensors that autograd saves wait for the backward in host memory.

    offload = Offload()
    for block in blocks:
        with offload.block():
            x = block(x)

A separate stream copies. Tensors leave the GPU while the next blocks compute, and return while the
backward is still busy with the following block. CPU tensors stay where they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy
PIECE_BYTES = 1 << 28  # of a tensor in host memory, a power of two


class Offload:
    """The offloading of all blocks of a model. A tensor saved in a block must not be written to
    later.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Block] | None = None

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @contextmanager
    def block(self, keep: Sequence[Tensor] = ()) -> Iterator[None]:
        """Keep tensors that are saved inside in host memory.

        In the backward they return together, followed by the tensors of the previous block. Tensors
        in `keep` stay on the device, for example because other blocks also use them.
        """
        block = _Block(self._last, {x.data_ptr() for x in keep})
        self._last = weakref.ref(block)
        try:
            with saved_tensors_hooks(lambda x: self._park(block, x), self._bring_back):
                yield
        finally:
            block.names.clear()  # from now on only the graph keeps parked tensors

    def _park(self, block: _Block, x: Tensor) -> Tensor | tuple[_Parked, torch.Size]:
        if not x.is_cuda or x.nbytes < LEAST_BYTES or x.data_ptr() in block.kept:
            return x
        found = block.names.get(_name(x))
        if found is not None and not found[1].expired():
            return found[0], x.shape  # an earlier operation saved the same memory
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = _HostCopy(x)
        x.record_stream(self._stream)
        parked = _Parked(block, host)
        block.names[_name(x)] = parked, StorageWeakRef(x.untyped_storage())
        block.parked.append(weakref.ref(parked))
        return parked, x.shape

    def _bring_back(self, saved: Tensor | tuple[_Parked, torch.Size]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        parked, shape = saved
        previous = parked.block.previous and parked.block.previous()
        for block in (parked.block, previous):
            for other in block.parked if block else ():
                if alive := other():
                    self._fetch(alive)
        fetched = self._fetch(parked)
        torch.cuda.current_stream().wait_event(fetched.arrived)
        return fetched.tensor if fetched.tensor.shape == shape else fetched.tensor.view(shape)

    def _fetch(self, parked: _Parked) -> _Fetched:
        """Start to copy a tensor back to its device, unless that was started before."""
        if parked.fetched is None:
            # made on the stream that will use it
            tensor = parked.host.allocate()
            tensor.record_stream(self._stream)  # the current stream may never use it
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                parked.host.copy_to(tensor)
                parked.fetched = _Fetched(tensor, self._stream.record_event())
        return parked.fetched


class _Block:
    """The parked tensors of one block.

    names  parked tensors by their memory, while the block's forward may save the same memory again.
           An allocator may reuse freed memory for the next tensor, so an entry counts while its
           owner lives.
    """

    def __init__(self, previous: weakref.ref[_Block] | None, kept: set[int]):
        self.previous, self.kept = previous, kept
        self.names: dict[tuple[Any, ...], tuple[_Parked, StorageWeakRef]] = {}
        self.parked: list[weakref.ref[_Parked]] = []


@dataclass(frozen=True)
class _Fetched:
    """A tensor on its device again, and the event after the copy."""

    tensor: Tensor
    arrived: torch.cuda.Event


class _Parked:
    """A tensor in host memory, and later on its device again."""

    def __init__(self, block: _Block, host: _HostCopy):
        self.block, self.host = block, host
        self.fetched: _Fetched | None = None


class _HostCopy:
    """A copy of a tensor in host memory, which is pinned if the tensor is on a GPU. A contiguous
    tensor is copied in pieces.

    torch rounds pinned memory up to a power of two, so a large tensor could take almost twice its
    bytes. Pieces of a power of two take no more than theirs.
    """

    def __init__(self, x: Tensor):
        self._device, self._is_cut = x.device, x.is_contiguous()
        self._form = torch.empty_like(x, device="meta")
        self._pieces = [
            torch.empty_like(piece, device="cpu", pin_memory=x.is_cuda).copy_(
                piece, non_blocking=True
            )
            for piece in self._cut(x)
        ]

    def allocate(self) -> Tensor:
        """Return memory for the tensor on its device."""
        return torch.empty_like(self._form, device=self._device)

    def copy_to(self, x: Tensor) -> None:
        """Start to copy to x, which `allocate` has returned."""
        for piece, host in zip(self._cut(x), self._pieces, strict=True):
            piece.copy_(host, non_blocking=True)

    def _cut(self, x: Tensor) -> Sequence[Tensor]:
        return x.view(-1).split(PIECE_BYTES // x.element_size()) if self._is_cut else (x,)


def _name(x: Tensor) -> tuple[Any, ...]:
    """Name the memory of x and the order of its entries. Contiguous views of different shapes have
    one name.
    """
    order = () if x.is_contiguous() else (x.shape, x.stride())
    return (x.data_ptr(), x.nbytes, x.dtype, x._version, order)
