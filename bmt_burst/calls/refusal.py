"""Refused calls: an error of this rank's arguments is raised on all ranks of its group."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from ..ranks.agreement import gather_terms
from ..ranks.rings import Group, make_rings

CALL = "a call of burst_attn_func"  # what ranks say that they begin

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refuse_wrong_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function` with its signature. A call that does not fit it raises on all ranks of the
    group in it.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*args, **named)
        except TypeError as error:
            if not _fit(signature, args, named):
                refuse_arguments(error, signature, args, named)
            raise

    return call


def _fit(signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **named)
    except TypeError:
        return False
    return True


def refuse_arguments(
    error: Exception, signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> NoReturn:
    """Raise an error of this rank's arguments as `refuse_call` does, in the group that is among
    them.
    """
    given = {**dict(zip(signature.parameters, args, strict=False)), **named}
    if "cu_seqlens" in signature.parameters:
        error = two_cu_seqlens(given.get("softmax_scale")) or error
    group = given.get("process_group", given.get("group"))  # compat's functions call it so
    refuse_call(error, group, given.get("double_group", (None, None)))


def two_cu_seqlens(softmax_scale: Any) -> TypeError | None:
    """Return the error of `_check_one_cu_seqlens`, or None if there is none."""
    if isinstance(softmax_scale, Tensor) and softmax_scale.dim() == 1:
        got = f"a Tensor of shape {tuple(softmax_scale.shape)}"
    elif isinstance(softmax_scale, list | tuple):
        got = f"a {type(softmax_scale).__name__}"
    else:
        return None
    return TypeError(
        f"softmax_scale must be a number, got {got}: "
        "unlike flash_attn_varlen_func, burst_attn_varlen_func takes one cu_seqlens and no max_seqlen"
    )


def refuse_call(
    error: Exception, process_group: Group | None, double_group: Sequence[Group | None]
) -> NoReturn:
    """Raises an error of this rank's in place of a call of burst_attn_func, and ValueError where
    the others call.
    """

    def fail() -> dict[str, Any]:
        raise error

    gather_terms(make_rings(process_group, double_group), CALL, fail)
    raise AssertionError("a failure was told and not raised")
