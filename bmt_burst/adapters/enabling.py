"""Models of other packages, changed in place: their classes, and hints for models inside others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

Class = TypeVar("Class", bound=type)


def find_base(
    model: Any,
    enabled: type[nn.Module],
    families: Mapping[type[nn.Module], Any],
    refused: Mapping[str, str],
    owner: str,
    hint: str = "",
) -> type[nn.Module]:
    """Return the class of `families` that `model` is an instance of. Raises ValueError for a model
    of class `enabled`, TypeError for others: with a reason of `refused`, with a module inside that
    can be enabled, or with `hint`.
    """
    name = type(model).__name__
    if isinstance(model, enabled):
        raise ValueError(f"this {name} is already enabled, for {model._sp.size} ranks")
    for base in families:
        if isinstance(model, base):
            return base
    refuse_by_name(model, refused)
    for path, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(part, tuple(families)):
            hint = f": pass its {path}, a {type(part).__name__}"
            break
    known = ", ".join(base.__name__ for base in families)
    raise TypeError(f"expected one of {owner} {known}, got a {name}{hint}")


def refuse_by_name(model: Any, refused: Mapping[str, str]) -> None:
    """Raise TypeError if the class of `model` or one of its bases has a reason in `refused`."""
    for own in type(model).__mro__:
        if own.__name__ in refused:
            raise TypeError(
                f"{type(model).__name__} cannot be sequence parallel: {refused[own.__name__]}"
            )


def make_class(own: type, base: Class, **members: Any) -> Class:
    """Return the class `base` with the methods of `own` before it, and more members."""
    same = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base)(base.__name__, (own, base), same | members)


# always the same class, as pickles and copies need
put_before: Callable[[Any, Any], Any] = functools.cache(make_class)


@contextmanager
def replaced(module: Any, **members: Any) -> Iterator[None]:
    """Replace members of a module within this context."""
    before = {name: getattr(module, name) for name in members}
    vars(module).update(members)
    try:
        yield
    finally:
        vars(module).update(before)
