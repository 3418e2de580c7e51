"""Offloading of tensors without values, which leave and return as by bmt_burst.offload."""

from __future__ import annotations

import itertools
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
        self._before: weakref.WeakSet[_Parked] = weakref.WeakSet()  # those of the last block

    @contextmanager
    def block(self, keep: Sequence[Tensor] = ()) -> Iterator[None]:
        """Let tensors that are saved inside leave the device, except those in `keep`."""
        previous, mine = self._before, weakref.WeakSet[_Parked]()
        self._before = mine
        kept = {x.untyped_storage()._cdata for x in keep}
        known: dict[tuple[int, int], tuple[_Parked, weakref.ref]] = {}  # by memory

        def park(x: Tensor) -> Tensor | tuple[_Parked, torch.Size]:
            storage = x.untyped_storage()
            if x.nbytes < LEAST_BYTES or storage._cdata in kept:
                return x
            name = storage._cdata, x.nbytes
            if name not in known or known[name][1]() is None:  # the same memory leaves once
                known[name] = _Parked(x, mine, previous), weakref.ref(storage)
                mine.add(known[name][0])
                self.parked.append(x.nbytes)
            return known[name][0], x.shape

        with saved_tensors_hooks(park, _bring_back):
            try:
                yield
            finally:
                known.clear()


class _Parked:
    """A tensor on the host, and later on its device again, `together` with these."""

    def __init__(self, x: Tensor, *together: weakref.WeakSet[_Parked]):
        self.shape, self.dtype, self.together = x.shape, x.dtype, together
        self._fetched: Tensor | None = None

    def fetch(self) -> Tensor:
        if self._fetched is None:
            self._fetched = torch.empty(self.shape, dtype=self.dtype, device=META)
        return self._fetched


def _bring_back(saved: Tensor | tuple[_Parked, torch.Size]) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    parked, shape = saved
    for other in itertools.chain(*parked.together):
        other.fetch()
    return parked.fetch().view(shape)
