"""Requests and plans of calls, of any kind of attention. Both are kept for calls that repeat.

A request is a call as one rank has checked it: everything but the values of tensors. One rank alone
does not know the length of the sequence that its tokens belong to. So the ranks compare the terms
of their requests in each call, and a plan follows from those of all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.autocast import autocast_dtype
from ..ranks.agreement import Terms, mark_known, read_own
from ..ranks.rings import Rings, find_kept
from ..ranks.sequence_parallel import WholeSequence

Request = TypeVar("Request")
Plan = TypeVar("Plan")

MOST_KEPT = 64  # requests and plans, each, for some rings


def find_request(
    rings: Rings,
    sequence: WholeSequence,
    options: Hashable,
    tensors: Sequence[Any],
    check: Callable[[], Request],
) -> Request:
    """Return the request that `check` makes of a call. It depends only on the arguments here, on
    autocast, on the grad mode and on what the tensors are, but not on their values.
    """
    if not isinstance(tensors[0], Tensor):
        return check()
    modes = torch.is_grad_enabled(), autocast_dtype(tensors[0])
    facts = (
        (type(x), x.shape, x.dtype, x.device, x.layout, x.requires_grad)
        if isinstance(x, Tensor) and not x.is_nested
        else type(x)
        for x in tensors
    )
    key = sequence.digest, options, modes, *facts
    try:
        hash(key)
    except TypeError:  # an option of a wrong type
        return check()
    return find_kept(rings.history.requests, key, check, MOST_KEPT)


def find_plan(
    rings: Rings,
    terms: Terms,
    lines: tuple[bytes, ...],
    make: Callable[[list[dict[str, Any]]], Plan],
) -> Plan:
    """Return the plan that `make` makes of the own terms of all ranks, for these lines."""

    def make_plan() -> Plan:
        return make(read_own(terms, lines))

    return find_kept(rings.history.plans, lines or terms.line, make_plan, MOST_KEPT)


@contextlib.contextmanager
def known_to_all() -> Iterator[None]:
    """Return a context for work that follows from all ranks' terms, so that a ValueError is raised
    on every rank.
    """
    try:
        yield
    except ValueError as error:
        mark_known(error)
        raise


def on_device(q: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which q's GPU is the current one. Kernels rely on it."""
    on_gpu = isinstance(q, Tensor) and q.is_cuda
    return torch.cuda.device_of(q) if on_gpu else contextlib.nullcontext()
