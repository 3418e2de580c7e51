"""Refused calls: if arguments are wrong on one rank, all ranks of its group raise an error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from ..ranks.agreement import gather_terms
from ..ranks.rings import Group, Rings, make_rings

CALL = "a call of burst_attn_func"  # its name in the ranks' messages

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def refuse_wrong_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `function`. A call that does not fit its signature raises on all ranks."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*args, **named)
        except TypeError as error:
            if not fits_signature(signature, args, named):
                refuse_arguments(error, signature, args, named)
            raise

    return call


def bind_arguments(
    name: str, signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of the function `name` by name. Raises TypeError if they do not fit."""
    try:
        return signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def fits_signature(
    signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> bool:
    """Whether a call with these arguments fits the signature."""
    try:
        signature.bind(*args, **named)
    except TypeError:
        return False
    return True


def refuse_arguments(
    error: Exception, signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> NoReturn:
    """Raise `error` as `refuse_call` does, in the group that the arguments name."""
    given = {**dict(zip(signature.parameters, args, strict=False)), **named}
    if "cu_seqlens" in signature.parameters:
        error = find_second_cu_seqlens(given.get("softmax_scale")) or error
    # the functions of compat call it group
    group = given.get("process_group", given.get("group"))
    refuse_call(error, group, given.get("double_group", (None, None)))


def find_second_cu_seqlens(softmax_scale: Any) -> TypeError | None:
    """Return the error of a call with flash-attn's arguments, or None for other calls.

    The fifth argument of flash-attn's function is cu_seqlens_k. Here that is softmax_scale.
    """
    if isinstance(softmax_scale, Tensor) and softmax_scale.dim() == 1:
        got = f"a Tensor of shape {tuple(softmax_scale.shape)}"
    elif isinstance(softmax_scale, list | tuple):
        got = f"a {type(softmax_scale).__name__}"
    else:
        return None
    return TypeError(
        f"softmax_scale must be a number, got {got}: unlike flash_attn_varlen_func, "
        "burst_attn_varlen_func takes one cu_seqlens and no max_seqlen"
    )


def refuse_call(
    error: Exception, process_group: Group | None, double_group: Sequence[Group | None]
) -> NoReturn:
    """Raise `error` instead of calling burst_attn_func. The other ranks raise ValueError.

    If the groups are wrong too, only this rank raises.
    """
    try:
        rings = make_rings(process_group, double_group)
    except (TypeError, ValueError) as wrong_group:
        raise error from wrong_group
    refuse_in_rings(rings, error)


def refuse_in_rings(rings: Rings, error: Exception) -> NoReturn:
    """Raise `error` instead of calling burst_attn_func, once the other ranks know it."""

    def fail() -> NoReturn:
        raise error

    gather_terms(rings, CALL, fail)
    raise AssertionError("gather_terms returned although its terms failed")
