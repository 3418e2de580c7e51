"""Keeps what autograd saves for the backward in host memory meanwhile.

    offload = Offload()
    for block in blocks:
        with offload.block():
            x = block(x)

Copies go both ways on a stream of their own: out of the GPU while the next blocks are computed, and
back while the backward is still busy with the block after. CPU tensors stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy


class Offload:
    """One for all blocks of a model. What is saved in a block must not be written to later."""

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[_Block] | None = None

    @contextmanager
    def block(self, keep: Sequence[Tensor] = ()) -> Iterator[None]:
        """What is saved within is kept in host memory; comes back in one go, with the block before
        on its way too.

        Tensors to `keep` stay on the device: others need them there anyway.
        """
        block = _Block(self._last, {x.data_ptr() for x in keep})
        self._last = weakref.ref(block)
        try:
            with saved_tensors_hooks(lambda x: self._park(block, x), self._bring_back):
                yield
        finally:
            block.names.clear()  # from now on only the graph keeps what is parked

    def _park(self, block: _Block, x: Tensor) -> Tensor | tuple[_Parked, torch.Size]:
        if not x.is_cuda or x.nbytes < _LEAST_BYTES or x.data_ptr() in block.kept:
            return x
        parked, owner = block.names.get(_name(x), (None, None))
        if parked is None or owner.expired():  # else an operation before saved the same memory
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(
                    x, non_blocking=True
                )
            x.record_stream(self._stream)
            parked = _Parked(block, host, x.device)
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
                self._fetch(other())
        torch.cuda.current_stream().wait_event(parked.arrived)
        return parked.back if parked.back.shape == shape else parked.back.view(shape)

    def _fetch(self, parked: _Parked | None) -> None:
        if parked is None or parked.back is not None:
            return
        # on the stream that will use it
        parked.back = torch.empty_like(parked.host, device=parked.device)
        parked.back.record_stream(self._stream)  # which may never use it
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            parked.back.copy_(parked.host, non_blocking=True)
            parked.arrived = self._stream.record_event()


class _Block:
    """What one block has parked; `names` while its forward may save the same memory again, by what
    memory it is.

    An allocator may give memory that was freed to the next tensor, so an entry counts while its
    owner lives.
    """

    def __init__(self, previous: weakref.ref[_Block] | None, kept: set[int]):
        self.previous, self.kept = previous, kept
        self.names: dict[tuple[Any, ...], tuple[_Parked, StorageWeakRef]] = {}
        self.parked: list[weakref.ref[_Parked]] = []


class _Parked:
    """A tensor in host memory, and on its device again once it was fetched."""

    def __init__(self, block: _Block, host: Tensor, device: torch.device):
        self.block, self.host, self.device = block, host, device
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


def _name(x: Tensor) -> tuple[Any, ...]:
    """What memory x is, in which order of entries; views of one shape or another are alike if they
    are contiguous.
    """
    order = () if x.is_contiguous() else (x.shape, x.stride())
    return (x.data_ptr(), x.nbytes, x.dtype, x._version, order)
