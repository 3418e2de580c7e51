"""Launches of Triton kernels that repeat earlier ones, with less host time.

`kernel[grid](...)` looks at every argument to find the compiled kernel that fits. That takes the
host 30 to 60 microseconds. A launch that differs from an earlier one only in the addresses of
tensors needs the same compiled kernel. So the compiled kernel is kept with all other arguments, and
gets the addresses as numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("bmt_burst")

ALIGNMENT = 16  # bytes. Triton compiles a kernel again for addresses that are no multiple
_MOST_LAUNCHES = 512

Pointers = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Launch:
    """A launch without its addresses.

    run      launches the compiled kernel
    offsets  bytes from each tensor's address to the address that the kernel gets for it
    counts   how many addresses each of the kernel's first arguments has: 0 for an address alone,
             otherwise the length of a tuple
    others   the kernel's other arguments
    """

    run: Callable[..., None]
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    others: tuple[Any, ...]

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch for tensors at these addresses, on a stream of the current device."""
        left = map(int.__add__, addresses, self.offsets)
        pointers = [
            tuple([next(left) for _ in range(count)]) if count else next(left)
            for count in self.counts
        ]
        self.run(*pointers, *self.others, stream=stream)


class Launches:
    """Launches by what they have in common with later ones that repeat them."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Launch] = {}
        self.are_kept = True

    def repeat(self, key: Hashable, addresses: Sequence[int], stream: int) -> bool:
        """Launch a kernel again, for tensors at these addresses. Return whether that was possible.

        key  as for `launch`
        """
        launch = self.known.get(key)
        if launch is None:
            return False
        try:
            launch(addresses, stream)
        except (AttributeError, TypeError, ValueError) as error:  # nothing was launched
            self.are_kept = False
            self.known.clear()
            logger.warning(
                "sums take the host more time: this Triton cannot repeat launches: %s", error
            )
            return False
        return True

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        pointers: Sequence[Pointers],
        others: tuple[Any, ...],
        key: Hashable | None,
        tensors: Sequence[Tensor],
    ) -> None:
        """Launch a kernel whose first arguments are `pointers`, and keep the launch.

        key      equal for launches that differ only in the addresses of `tensors`; None if there
                 are no such launches
        tensors  the tensors that `pointers` are parts of, in the same order
        """
        compiled = kernel[grid](*pointers, *others)
        flat = [x for group in pointers for x in (group if isinstance(group, tuple) else (group,))]
        if key is None or compiled is None or not self.are_kept:  # None: it was interpreted
            return
        if len(flat) != len(tensors) or not all(map(_share_memory, flat, tensors)):
            return  # a copy, or fewer parts
        if len(self.known) >= _MOST_LAUNCHES:
            self.known.clear()
        self.known[key] = Launch(
            compiled[(*grid, 1)],
            tuple(x.data_ptr() - y.data_ptr() for x, y in zip(flat, tensors, strict=True)),
            tuple(len(group) if isinstance(group, tuple) else 0 for group in pointers),
            others,
        )


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def current_raw_stream(x: Tensor) -> int:
    """Return the current stream of x's GPU, as CUDA's driver takes it."""
    stream: int = torch._C._cuda_getCurrentRawStream(x.get_device())
    return stream
