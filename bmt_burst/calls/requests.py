"""Requests and plans of calls, of any kind of attention. Both are kept for calls that repeat.

A request is a call as one rank has checked it: everything but the values of tensors. A rank does
not know the length of the whole sequence. So a plan follows from the terms of all ranks' requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.autocast import autocast_dtype
from ..ranks.agreement import Terms, mark_known, read_own
from ..ranks.rings import Group, Rings
from ..ranks.sequence_parallel import WholeSequence
from ..sequence.rows import Layouts, Masks

Request = TypeVar("Request")
Plan = TypeVar("Plan")

_NO_HOSTS = (None, None)


def find_sequence(
    rings: Rings,
    groups: tuple[Group | None, Sequence[Group | None]],
    mask: Masks | WholeSequence | None,
    layout: Layouts,
    kv_layout: Layouts | None = None,
    causal: bool = False,
    packed: bool = False,
) -> tuple[WholeSequence, Rings]:
    """Return the sequence that a public function's arguments name, and the rings of its ranks.

    rings   those that the function's `groups` name, process_group and double_group
    mask    also the result of `sp.sequence`, which has its own layouts and ranks

    Raises TypeError or ValueError if an argument is wrong.
    """
    if not isinstance(mask, WholeSequence):
        return WholeSequence.local(mask, layout, kv_layout, causal, packed), rings
    if layout != "zigzag" or kv_layout is not None or causal:
        raise ValueError(
            "expected mask=sequence alone, got layout, kv_layout or causal too: it has its own"
        )
    process_group, double_group = groups[0], tuple(groups[1])
    own = tuple(mask.sp.double_group)
    if process_group not in (None, mask.sp.process_group) or double_group not in (_NO_HOSTS, own):
        raise ValueError("expected no group with mask=sequence, or its own, got another one")
    return mask, mask.sp.rings


def find_request(
    rings: Rings,
    sequence: WholeSequence,
    options: Hashable,
    tensors: Sequence[Any],
    check: Callable[[], Request],
) -> Request:
    """Return the request that `check` makes of a call. It depends only on the arguments here,
    autocast, the grad mode and what the tensors are, not on their values.
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
    history = rings.history
    return history.find(history.requests, key, check)


def find_plan(
    rings: Rings,
    terms: Terms,
    lines: tuple[bytes, ...],
    make: Callable[[list[dict[str, Any]]], Plan],
) -> Plan:
    """Return the plan that `make` makes of the own terms of all ranks, for these lines."""

    def make_plan() -> Plan:
        return make(read_own(terms, lines))

    history = rings.history
    return history.find(history.plans, lines or terms.line, make_plan)


@contextlib.contextmanager
def known_to_all() -> Iterator[None]:
    """Return a context for work that follows from all ranks' terms: all raise its ValueErrors."""
    try:
        yield
    except ValueError as error:
        mark_known(error)
        raise


def on_device(q: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which q's GPU is the current one. Kernels rely on it."""
    on_gpu = isinstance(q, Tensor) and q.is_cuda
    return torch.cuda.device_of(q) if on_gpu else contextlib.nullcontext()
