"""Offloading of tensors without values, which leave and return as by bmt_burst.offload."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bmt_burst.offload import LEAST_BYTES, Offload

from .ledger import META


class PlannedOffload(Offload):
    """An Offload that moves no bytes. `parked` has those of each tensor that leaves the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.parked: list[int] = []
        self._before: weakref.ref[_Parking] | None = None

    @contextmanager
    def block(self, keep: Sequence[Tensor] = ()) -> Iterator[None]:
        """Let tensors that are saved inside leave the device, except those in `keep`."""
        parking = _Parking(self._before)
        self._before = weakref.ref(parking)
        kept = {x.untyped_storage()._cdata for x in keep}

        def park(x: Tensor) -> Tensor | tuple[_Parked, torch.Size]:
            if x.nbytes < LEAST_BYTES or x.untyped_storage()._cdata in kept:
                return x
            return parking.park(x, self.parked), x.shape

        with saved_tensors_hooks(park, _bring_back):
            try:
                yield
            finally:
                parking.known.clear()


class _Parking:
    """The tensors of one block that left. `known` has them by memory, during the forward."""

    def __init__(self, previous: weakref.ref[_Parking] | None):
        self.previous = previous
        self.known: dict[tuple[int, int], tuple[_Parked, weakref.ref]] = {}
        self.all: list[weakref.ref[_Parked]] = []

    def park(self, x: Tensor, sizes: list[int]) -> _Parked:
        """Return x as it waits on the host. The same memory leaves once."""
        storage = x.untyped_storage()
        name = storage._cdata, x.nbytes
        found = self.known.get(name)
        if found is not None and found[1]() is not None:
            return found[0]
        parked = _Parked(self, x)
        self.known[name] = parked, weakref.ref(storage)
        self.all.append(weakref.ref(parked))
        sizes.append(x.nbytes)
        return parked


class _Parked:
    """A tensor on the host, and later on its device again."""

    def __init__(self, parking: _Parking, x: Tensor):
        self.parking, self.shape, self.dtype = parking, x.shape, x.dtype
        self._fetched: Tensor | None = None

    def fetch(self) -> Tensor:
        if self._fetched is None:
            self._fetched = torch.empty(self.shape, dtype=self.dtype, device=META)
        return self._fetched


def _bring_back(saved: Tensor | tuple[_Parked, torch.Size]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    parked, shape = saved
    previous = parked.parking.previous and parked.parking.previous()
    for parking in (parked.parking, previous):
        for other in parking.all if parking else ():
            if alive := other():
                alive.fetch()
    return parked.fetch().view(shape)
