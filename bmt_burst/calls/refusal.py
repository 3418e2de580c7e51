"""Refused calls: if arguments are wrong on one rank, all ranks of its group raise an error."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from ..ranks.agreement import refuse
from ..ranks.rings import Group, make_rings
from ..ranks.sequence_parallel import WholeSequence

CALL = "a call of burst_attn_func"  # its name in the ranks' messages

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def bind_arguments(
    name: str, signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of the function `name` by name. Raises TypeError if they do not fit."""
    try:
        return signature.bind(*args, **named)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def refuse_arguments(
    error: Exception,
    signature: inspect.Signature,
    args: Sequence[Any],
    named: Mapping[str, Any],
    instead: Mapping[str, str],
    doing: str = CALL,
) -> NoReturn:
    """Raise `error` as `refuse_call` does, in the group that the arguments name.

    instead  hints for arguments that the function does not have
    """
    given = {**dict(zip(signature.parameters, args, strict=False)), **named}
    unknown = named.keys() - signature.parameters.keys()
    if hints := sorted({instead[name] for name in unknown & instead.keys()}):
        error = TypeError(f"{error}: {'; '.join(hints)}")
    if "cu_seqlens" in signature.parameters:
        error = find_second_cu_seqlens(given.get("softmax_scale")) or error
    groups = given.get("process_group"), given.get("double_group", (None, None))
    refuse_call(error, *groups, doing, given.get("mask"))


def refuse_wrong_arguments(
    function: Callable[Parameters, Result],
    refuse: Callable[[Exception, inspect.Signature, Sequence[Any], Mapping[str, Any]], NoReturn],
) -> Callable[Parameters, Result]:
    """Return `function`, but `refuse` raises for a call that does not fit its signature."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Result:
        try:
            return function(*args, **named)
        except TypeError as error:
            try:
                signature.bind(*args, **named)
            except TypeError:
                refuse(error, signature, args, named)
            raise

    return call


def find_second_cu_seqlens(softmax_scale: Any) -> TypeError | None:
    """Return the error of a call with flash-attn's cu_seqlens_k as the fifth argument, or None."""
    is_tensor = isinstance(softmax_scale, Tensor) and softmax_scale.dim() == 1
    if not is_tensor and not isinstance(softmax_scale, list | tuple):
        return None
    return TypeError(
        f"softmax_scale must be a number, got a {type(softmax_scale).__name__}: unlike "
        "flash_attn_varlen_func, burst_attn_varlen_func takes cu_seqlens_k by name and no "
        "max_seqlen"
    )


def refuse_call(
    error: Exception,
    process_group: Group | None,
    double_group: Sequence[Group | None],
    doing: str = CALL,
    mask: Any = None,
) -> NoReturn:
    """Raise `error` instead of the call `doing`. The other ranks raise RanksDisagree, unless the
    groups are wrong too. They are the ranks of `mask` if it is the result of `sp.sequence`.
    """
    if isinstance(mask, WholeSequence):
        refuse(mask.sp.rings, doing, error)
    try:
        rings = make_rings(process_group, double_group)
    except (TypeError, ValueError) as wrong_group:
        raise error from wrong_group
    refuse(rings, doing, error)
