"""Names of what a call does, as ranges in profiles of torch.profiler and nsys."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import _profiler_enabled
from torch.autograd.profiler import record_function

Given = ParamSpec("Given")
Result = TypeVar("Result")


def in_range(
    name: object, call: Callable[Given, Result], *args: Given.args, **named: Given.kwargs
) -> Result:
    """Return the result of `call`, which a profile shows as a range of this name. Without a
    profiler, which is asked for first, a range would cost some microseconds.
    """
    if not _profiler_enabled():
        return call(*args, **named)
    with record_function(f"burst {name}"):
        return call(*args, **named)
