"""Checks of configurations: the names, types and ranges of a dataclass's fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

_KINDS: dict[str, Any] = {"int": int, "float": int | float, "bool": bool, "str": str}
_MOST_PARAMETERS = 10**15  # larger sizes are mistakes, and overflow torch's


def check_names(cls: Any, names: Collection[str], expected: str) -> None:
    """Raise ValueError unless `names` are arguments of a dataclass, and all that it needs."""
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    needed = [name for name, default in fields.items() if default is dataclasses.MISSING]
    missing = [name for name in needed if name not in names]
    unknown = [name for name in names if name not in fields]
    if missing or unknown:
        raise ValueError(f"{expected}: missing {missing[:5]}, unknown {unknown[:5]}")


def check_sizes(values: Mapping[str, Any], needed: Collection[str], sizes: Collection[str]) -> None:
    """Raise ValueError unless a config.json has what is `needed`, and `sizes` are positive ints."""
    if missing := sorted(name for name in needed if name not in values):
        raise ValueError(f"config.json lacks {missing}")
    for name in sizes:
        if name in values and (type(values[name]) is not int or values[name] < 1):
            raise ValueError(f"{name} must be a positive int, got {values[name]!r}")


def check_fields(config: Any) -> None:
    """Raise ValueError unless int, float, bool and str fields are so, and numbers are positive."""
    for field in dataclasses.fields(config):
        kind: str = str(field.type).removesuffix(" | None")
        value: Any = getattr(config, field.name)
        if kind not in _KINDS or (value is None and "None" in str(field.type)):
            continue
        if not isinstance(value, _KINDS[kind]) or isinstance(value, bool) != (kind == "bool"):
            raise ValueError(f"{field.name} must be {kind}, got {value!r}")
        if isinstance(value, int | float) and kind != "bool" and not 0 < value < math.inf:
            raise ValueError(f"{field.name} must be positive and finite, got {value}")


def check_size(num_parameters: int) -> None:
    """Check that a model is not absurdly large. Raises ValueError."""
    if num_parameters >= _MOST_PARAMETERS:
        raise ValueError(
            f"expected sizes that make less than 1e15 parameters, got {float(num_parameters):.0e}"
        )
