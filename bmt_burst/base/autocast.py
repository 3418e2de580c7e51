"""Autocast for this library's operations, as torch casts the inputs of a linear layer."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from .arguments import check_tensor

_CAST = (torch.float16, torch.bfloat16, torch.float32)
_UNCHANGED = contextlib.nullcontext()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes with on x's device, or None where it is off."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if _is_on(device_type) else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on x's device. It costs nothing where that is off."""
    device_type = x.device.type
    return torch.autocast(device_type, enabled=False) if _is_on(device_type) else _UNCHANGED


def _is_on(device_type: str) -> bool:
    return _is_available(device_type) and torch.is_autocast_enabled(device_type)


_is_available = functools.cache(torch.amp.is_autocast_available)


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return x in the dtype of autocast, if there is one. Tensors in fp64 and integers stay so."""
    return x if dtype is None or x.dtype not in _CAST else x.to(dtype)


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return q, k and v as `autocast` does. Raises TypeError for anything but dense tensors."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    return [autocast(x) for x in (q, k, v)]


def autocast(x: Tensor) -> Tensor:
    """Return x in the dtype that autocast computes with on x's device."""
    return cast(x, autocast_dtype(x))
