"""A ledger of memory: it counts the bytes of tensors without values while real code runs on them.

They allocate and free exactly what they would on a GPU, in a moment, on any machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

META = torch.device("meta")
_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.addmm_.default,
    torch.ops.aten.addmm.out,
}
_NOT_WRITTEN = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}


@dataclass(frozen=True)
class Work:
    """Operations of matrix products, and bytes that these and all other operations read and write.

    fp8  operations of products in float8, which `products` does not count
    """

    products: float = 0
    traffic: float = 0
    fp8: float = 0

    def __add__(self, other: Work) -> Work:
        products, traffic = self.products + other.products, self.traffic + other.traffic
        return Work(products, traffic, self.fp8 + other.fp8)

    def __mul__(self, factor: float) -> Work:
        return Work(self.products * factor, self.traffic * factor, self.fp8 * factor)

    def in_fp8(self) -> Work:
        """Return the same work with all products in float8."""
        return Work(0, self.traffic, self.products + self.fp8)


class Ledger(TorchDispatchMode):
    """A context that counts the bytes of tensors made in it, `now` and at `most` since `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.work = Work()
        self._known: dict[int, weakref.finalize] = {}

    def start(self) -> None:
        """Start to count the peak and the work again."""
        self.most, self.work = self.now, Work()

    def ignore(self, *tensors: Tensor) -> None:
        """Do not count tensors that exist already, for example parameters, nor views of them."""
        for x in tensors:
            self._watch(x, 0)

    def __torch_dispatch__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # indices that real code sends to a GPU
        args, kwargs = tree_map(_without_values, (args, kwargs or {}))
        result = function(*args, **kwargs)
        made = sum(self._count(x) for x in tree_iter(result) if isinstance(x, Tensor))
        read = sum(x.nbytes for x in tree_iter(args) if isinstance(x, Tensor))
        if function in _PRODUCTS:
            self.work += Work(2 * result.numel() * args[-1].shape[-2], read + result.nbytes)
        elif made and function not in _NOT_WRITTEN:
            self.work += Work(traffic=made + read)
        return result

    def _count(self, x: Tensor) -> int:
        """Count a tensor's memory if it is new. Return its bytes."""
        if x.untyped_storage()._cdata in self._known:
            return 0
        nbytes = x.untyped_storage().nbytes()
        self.now += nbytes
        self.most = max(self.most, self.now)
        self._watch(x, nbytes)
        return nbytes

    def _watch(self, x: Tensor, nbytes: int) -> None:
        """Count `nbytes` less when the memory of x is freed."""
        storage = x.untyped_storage()
        key = storage._cdata

        def free() -> None:
            del self._known[key]
            self.now -= nbytes

        self._known[key] = weakref.finalize(storage, free)
        self._known[key].atexit = False


def _without_values(x: Any) -> Any:
    # torch 2.11's checkpoints save an empty tensor, and compare its device later
    has_values = isinstance(x, Tensor) and x.is_cpu and x.dim() and x.numel()
    return x.to(META) if has_values else x
