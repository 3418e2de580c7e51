"""Models of other packages, changed in place: their classes, and hints for models inside others."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..ranks.sequence_parallel import SequenceParallel


def check_sp(sp: Any) -> None:
    """Raise TypeError if sp is not a SequenceParallel."""
    if not isinstance(sp, SequenceParallel):
        raise TypeError(
            f"sp must be a SequenceParallel, from init_sequence_parallel, got {type(sp).__name__}"
        )


def check_not_enabled(model: Any, enabled: type[nn.Module]) -> None:
    """Raise ValueError if the model is an instance of `enabled`."""
    if isinstance(model, enabled):
        raise ValueError(
            f"this {type(model).__name__} is already enabled, for {model._sp.size} ranks"
        )


def find_inside(model: Any, families: Iterable[type[nn.Module]]) -> str:
    """Return a hint with a module of `model` that can be enabled, or nothing if it has none."""
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, tuple(families)):
            return f": pass its {path}, a {type(part).__name__}"
    return ""


def put_before(own: type, base: type) -> type[nn.Module]:
    """Return the class `base` with the methods of `own` before it, always the same one."""
    return _make_class(own, base)


@functools.cache
def _make_class(own: Any, base: Any) -> type[nn.Module]:
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (own, base), same)
