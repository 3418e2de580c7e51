"""Policies of torch's selective activation checkpointing, which keep the results of operations.

A recomputation takes what a policy kept, an operation's nth result for its nth run. That is wrong
if the first run changed the result in place, which a view may hide from torch, and if only the
first run makes plans and tables: then counts differ. So policies see no operations of this
library's calls, except for those of the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_POLICIES = _CachingTorchDispatchMode, _CachedTorchDispatchMode  # of a first run, of its repetition
_UNCHANGED = nullcontext()
_hidden: ContextVar[tuple[TorchDispatchMode, ...]] = ContextVar("hidden_policies", default=())


def without_policies() -> AbstractContextManager[Any]:
    """Return a context whose operations no policy sees. It costs nothing where there is none."""
    if not torch._C._len_torch_dispatch_stack():
        return _UNCHANGED
    modes = _get_current_dispatch_mode_stack()
    policies = tuple(mode for mode in modes if isinstance(mode, _POLICIES))
    return _hide(modes, policies) if policies else _UNCHANGED


@contextmanager
def _hide(
    modes: list[TorchDispatchMode], policies: tuple[TorchDispatchMode, ...]
) -> Iterator[None]:
    others = [mode for mode in modes if mode not in policies]
    token = _hidden.set(policies)
    _replace_modes(modes, others)
    try:
        yield
    finally:
        _replace_modes(others, modes)
        _hidden.reset(token)


def _replace_modes(old: list[TorchDispatchMode], new: list[TorchDispatchMode]) -> None:
    for _ in old:
        _pop_mode()
    for mode in new:
        _push_mode(mode)


def seen_by_policies(operation: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return an operation of a kernel, which policies see also inside `without_policies`. Nothing
    may change its results in place.
    """

    @functools.wraps(operation)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        policies = _hidden.get()
        for mode in policies:
            _push_mode(mode)
        try:
            return operation(*args, **named)
        finally:
            for _ in policies:
                _pop_mode()

    return call
