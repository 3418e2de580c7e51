"""Checks of arguments: plain tensors, and numbers of Python or numpy, which become Python's."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from .dtypes import accumulator_dtype

Item = TypeVar("Item")

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of inputs


def as_bool(name: str, value: Any) -> bool:
    """Return a bool. Raises TypeError for anything but True and False."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {_shown(value)}")


def as_int(name: str, value: Any) -> int:
    """Return an int. Raises TypeError for anything but a whole number; True and 2.0 are none."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return operator.index(value)
    raise TypeError(f"{name} must be a whole number, got {_shown(value)}")


def as_count(name: str, value: Any) -> int:
    """Return an int. Raises TypeError or ValueError for anything but a whole number from 1 on."""
    if (count := as_int(name, value)) < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count


def check_iterable(name: str, values: Any) -> Iterable[Any]:
    """Return `values`. Raises TypeError unless they can be read as a sequence of numbers."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of whole numbers, got {type(values).__name__}")
    return values


def as_float(name: str, value: Any) -> float:
    """Return a float. Raises TypeError for anything but a number, ValueError if it is too large."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {_shown(value)}")
    try:
        return float(value)
    except OverflowError:
        bits = operator.index(math.floor(value)).bit_length()
        raise ValueError(f"{name} must be finite, got a number of {bits} bits") from None


def as_positive(name: str, value: Any) -> float:
    """Return a positive and finite float. Raises TypeError or ValueError for anything else."""
    number = as_float(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """Raise TypeError for anything but a string, ValueError for one that is no choice."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {sorted(choices)}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; expected one of {sorted(choices)}")


def check_tensor(name: str, x: Any) -> None:
    """Raise TypeError for anything but a dense tensor with values of its own."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested or x.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got a nested one or layout {x.layout}")
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        hint = ": give its to_local(), this rank's part" if hasattr(x, "to_local") else ""
        reason = f"a {type(x).__name__} has no values of its own"
        raise TypeError(f"{name} must be a plain tensor, {reason}{hint}")


def check_like_lse(name: str, x: Tensor, q: Tensor) -> None:
    """Raise if x is not in the dtype of q's lse, or not on q's device."""
    if x.dtype != (wide := accumulator_dtype(q.dtype)):
        raise TypeError(f"{name} must be {wide} for {q.dtype} inputs, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device, {q.device}, got {x.device}")


def check_dim(x: Tensor, dim: Any) -> int:
    """Return `dim`, counted from the front.

    Raises TypeError for no tensor or no whole number, ValueError if x has no such dimension.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(x).__name__}")
    index = as_int("dim", dim)
    if not -x.dim() <= index < x.dim():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no dimension {index}")
    return index % x.dim()


def _shown(value: Any) -> str:
    """Return a wrong value as an error shows it, or its type if the value may be long."""
    if isinstance(value, Tensor):
        hint = "; give its item()" if value.numel() == 1 else ""
        return f"a {type(value).__name__} of shape {tuple(value.shape)}{hint}"
    is_short = isinstance(value, str | bool | float | int | None)
    return repr(value) if is_short else type(value).__name__


def expand_rows(
    name: str,
    given: Item | Sequence[Item] | None,
    kinds: tuple[type[Any], ...],
    batch: int,
    hint: str = "",
) -> tuple[Item, ...]:
    """Return one item for each row of the batch, or none if none was passed.

    Raises TypeError, which `hint` ends, if an item is not of `kinds`. Raises ValueError if their
    number is not `batch`.
    """
    if given is None:
        return ()
    if isinstance(given, kinds):
        return (given,) * batch
    rows = tuple(given) if isinstance(given, list | tuple) else (given,)
    for row in rows:
        if not isinstance(row, kinds) or row is given:
            kind, got = kinds[-1].__name__, type(row).__name__
            raise TypeError(f"{name} must be a {kind} or one for each row, got {got}{hint}")
    if len(rows) != batch:
        raise ValueError(f"{name} has {len(rows)} entries for a batch of {batch} rows")
    return rows
