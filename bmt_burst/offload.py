"""Keeps what autograd saves for the backward in host memory meanwhile.

    offload = Offload()
    for block in blocks:
        with offload.block():
            x = block(x)

Copies go both ways on a stream of their own: out of the GPU while the next blocks are computed, and back while the
backward is still busy with the block after. CPU tensors stay where they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy


class Offload:
    """One for all blocks of a model. What is saved in a block must not be written to later."""

    def __init__(self):
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[_Block] | None = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """What is saved within is kept in host memory; comes back in one go, with the block before on its way too."""
        block = _Block(self._last)
        self._last = weakref.ref(block)
        with saved_tensors_hooks(lambda x: self._park(block, x), self._bring_back):
            yield

    def _park(self, block: _Block, x: Tensor) -> Tensor | _Parked:
        if not x.is_cuda or x.nbytes < _LEAST_BYTES:
            return x
        name = (x.data_ptr(), x._version, x.dtype, x.shape, x.stride())
        if name not in block.names:  # an operation and the one after it may save the same tensor
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            x.record_stream(self._stream)
            block.names[name] = _Parked(block, host, x.device)
            block.parked.append(weakref.ref(block.names[name]))
        return block.names[name]

    def _bring_back(self, saved: Tensor | _Parked) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        saved.block.names.clear()  # the forward is over: only the graph keeps what is parked
        previous = saved.block.previous and saved.block.previous()
        for block in (saved.block, previous):
            for parked in block.parked if block else ():
                self._fetch(parked())
        torch.cuda.current_stream().wait_event(saved.arrived)
        return saved.back

    def _fetch(self, parked: _Parked | None) -> None:
        if parked is None or parked.back is not None:
            return
        parked.back = torch.empty_like(parked.host, device=parked.device)  # on the stream that will use it
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            parked.back.copy_(parked.host, non_blocking=True)
            parked.arrived = self._stream.record_event()


class _Block:
    """What one block has parked; `names` while its forward may park the same tensor again."""

    def __init__(self, previous: weakref.ref[_Block] | None):
        self.previous = previous
        self.names: dict[tuple[Any, ...], _Parked] = {}
        self.parked: list[weakref.ref[_Parked]] = []


class _Parked:
    """A tensor in host memory, and on its device again once it was fetched."""

    def __init__(self, block: _Block, host: Tensor, device: torch.device):
        self.block, self.host, self.device = block, host, device
        self.back: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None
