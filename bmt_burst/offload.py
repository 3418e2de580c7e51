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
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy
PIECE_BYTES = 1 << 28  # of a tensor in host memory, a power of two


class Offload:
    """The offloading of a model's blocks. What a block saves must not be written to later."""

    def __init__(self) -> None:
        self._last: list[weakref.ref[Parked]] = []  # tensors of the last block

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @contextmanager
    def block(self, keep: Sequence[Tensor] = ()) -> Iterator[None]:
        """Keep tensors that are saved inside in host memory. In the backward they return together,
        followed by those of the previous block.

        keep  tensors that stay on the device, for example because other blocks also use them
        """
        previous, mine = self._last, list[weakref.ref[Parked]]()
        self._last = mine
        kept = {x.untyped_storage()._cdata for x in keep}
        # Parked tensors by their memory. An allocator may reuse freed memory for the next tensor,
        # so an entry counts while the owner of the memory lives.
        known: dict[tuple[Any, ...], tuple[Parked, StorageWeakRef]] = {}

        def park(x: Tensor) -> Tensor | tuple[Parked, torch.Size]:
            if x.untyped_storage()._cdata in kept or not self._leaves(x):
                return x
            name = _name(x)
            if name not in known or known[name][1].expired():
                parked = self._move(x)
                parked.together = mine, previous
                known[name] = parked, StorageWeakRef(x.untyped_storage())
                mine.append(weakref.ref(parked))
            return known[name][0], x.shape

        with saved_tensors_hooks(park, _bring_back):
            try:
                yield
            finally:
                known.clear()  # from now on only the graph keeps parked tensors

    def _leaves(self, x: Tensor) -> bool:
        """Whether a tensor that is saved in a block leaves its device."""
        return x.is_cuda and x.nbytes >= LEAST_BYTES

    def _move(self, x: Tensor) -> Parked:
        """Start to copy a tensor to host memory."""
        return Parked(x, self._stream)


class Parked:
    """A saved tensor in pinned host memory, and later on its device again.

    A contiguous tensor is copied in pieces of a power of two, since torch rounds pinned memory up
    to one: a large tensor could take almost twice its bytes.
    """

    # of its block and of the previous one, which return with it
    together: tuple[Sequence[weakref.ref[Parked]], ...]

    def __init__(self, x: Tensor, stream: torch.cuda.Stream):
        self._stream, self._device, self._is_cut = stream, x.device, x.is_contiguous()
        self._form = torch.empty_like(x, device="meta")
        self._fetched: Tensor | None = None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._pieces = [
                torch.empty_like(piece, device="cpu", pin_memory=True).copy_(
                    piece, non_blocking=True
                )
                for piece in self._cut(x)
            ]
        x.record_stream(stream)

    def fetch(self) -> None:
        """Start to bring the tensor back, unless that was started before."""
        if self._fetched is not None:
            return
        # made on the stream that will use it
        self._fetched = torch.empty_like(self._form, device=self._device)
        self._fetched.record_stream(self._stream)  # the current stream may never use it
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for piece, host in zip(self._cut(self._fetched), self._pieces, strict=True):
                piece.copy_(host, non_blocking=True)
            self._arrived = self._stream.record_event()

    def take(self) -> Tensor:
        """Return the tensor for use on the current stream."""
        assert self._fetched is not None, "fetch comes first"
        torch.cuda.current_stream().wait_event(self._arrived)
        return self._fetched

    def _cut(self, x: Tensor) -> Sequence[Tensor]:
        return x.view(-1).split(PIECE_BYTES // x.element_size()) if self._is_cut else (x,)


def _bring_back(saved: Tensor | tuple[Parked, torch.Size]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    parked, shape = saved
    for other in itertools.chain(*parked.together):
        if alive := other():
            alive.fetch()
    x = parked.take()
    return x if x.shape == shape else x.view(shape)


def _name(x: Tensor) -> tuple[Any, ...]:
    """Name the memory of x and the order of its entries, for all contiguous views the same."""
    order = () if x.is_contiguous() else (x.shape, x.stride())
    memory = x.untyped_storage()._cdata, x.storage_offset(), x.nbytes, x.dtype
    return *memory, x._version, order
