"""Kernels of lightning attention: the contract `Kernel`, and the choice of one.

A kernel is a module. Its forward and its backward have two passes each, and ranks exchange states
in between:

    forward_states   the state before each chunk, as if all segments began with 0
                     -> ranks exchange `last`, the states after segments, and add them up
    outputs          adds the decayed initial states, and returns out

    backward_states  the gradient of the state after each chunk, as if all of them ended with 0
                     -> ranks exchange `last`, the gradients of the states before segments
    gradients        adds the decayed gradients, and returns dq, dk and dv

So what ranks send is a part of what the kernel computes anyway.

Tokens are flat: T tokens of this rank, the rows of the batch one after the other. q, k, v and dout
are (T, H, D) in one dtype, T at least 1, the last dimension contiguous. slopes (H,) and all states
are wide: fp32, or fp64 for fp64 inputs. States are (N, H, D, D): first the entries of k or q, then
those of v or dout. There may be no open segment, so N may be 0. Exponents must never be positive:
any finite slope from 0 on gives finite results. Two runs return the same bits.

To add a kernel, write a module with these functions, and name it in `_MODULES`.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

from torch import Tensor

from .segments import Segments

_MODULES = {"reference": "reference"}  # by their names, the fastest first


class States(Protocol):
    """The result of a first pass. Only `last` has a meaning outside of the kernel, which may keep
    the states of chunks in any form. A segment's first chunk begins with 0, so a thousand short
    segments need no memory.
    """

    last: Tensor


class Kernel(Protocol):
    """The functions of a kernel's module. `reference.py` specifies them."""

    def refuses(self, q: Tensor) -> str | None:
        """Return why the kernel cannot compute with tensors like q (..., H, D), or None."""

    def forward_states(self, k: Tensor, v: Tensor, slopes: Tensor, segments: Segments) -> States:
        """Return states whose `last` is (len(segments.leaves), H, D, D): for each of these
        segments, the sum of e^(-slope (end - 1 - t)) k_t v_t^T.
        """

    def outputs(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        scale: float,
        segments: Segments,
        states: Any,
        initial: Tensor,
    ) -> Tensor:
        """Return out (T, H, D), contiguous, in q's dtype: o_t = scale * S_t^T q_t.

        states   what `forward_states` returned, used once
        initial  (len(segments.opens), H, D, D): the states with which these segments begin
        """

    def backward_states(
        self, q: Tensor, dout: Tensor, slopes: Tensor, scale: float, segments: Segments
    ) -> States:
        """Return states whose `last` is (len(segments.opens), H, D, D): for each of these
        segments, the sum of scale e^(-slope (t - start + 1)) q_t dout_t^T.
        """

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        slopes: Tensor,
        scale: float,
        segments: Segments,
        initial: Tensor,
        gradient_states: Any,
        dfinal: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv (T, H, D), contiguous, in q's dtype. The states of the forward are
        computed again, from k, v and `initial`.

        gradient_states  what `backward_states` returned, used once
        dfinal           (len(segments.leaves), H, D, D): the gradients of the last states of these
                         segments

        The gradients of `initial` are not returned: they are those of `backward_states` plus the
        decayed `dfinal`, which the ranks add up.
        """


def names() -> tuple[str, ...]:
    """Return the names of all kernels, the fastest first."""
    return tuple(_MODULES)


def load(name: str) -> Kernel:
    """Return the kernel called `name`."""
    return cast(Kernel, importlib.import_module(f".{_MODULES[name]}", __package__))


def pick(name: str, q: Tensor) -> tuple[str, Kernel]:
    """Return the name and the kernel that `name` asks for: that one, or for "auto" the fastest.

    Raises ValueError for an unknown name, and for a kernel that cannot compute with tensors like q.
    """
    if not isinstance(name, str):
        raise TypeError(f"flash must be the name of a kernel, got {name!r}")
    if name == "auto":
        fitting = (other for other in names() if load(other).refuses(q) is None)
        name = next(fitting)
    if name not in _MODULES:
        raise ValueError(f"unknown flash {name!r}; expected 'auto' or one of {list(names())}")
    kernel = load(name)
    if reason := kernel.refuses(q):
        raise ValueError(f"flash={name!r} cannot compute this call: {reason}")
    return name, kernel
