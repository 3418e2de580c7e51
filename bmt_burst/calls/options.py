"""The options of a call. `burst_attn_func` documents each of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .. import strategies
from ..base.arguments import as_bool, as_int, as_positive
from ..base.dtypes import accumulator_dtype
from ..sequence.layout import LAYOUTS, Balanced, Layout
from ..sequence.mask import Mask

# Each is one for the whole batch, or one for each of its rows.
Masks: TypeAlias = Mask | Sequence[Mask]
Layouts: TypeAlias = str | Layout | Sequence[str | Layout]

_BACKWARDS = ("auto", "q", "kv")


class Options(NamedTuple):
    """The options of a call, as they were passed or as `check_options` returned them.

    kv_layout  the layout of the keys, or None for `layout`
    is_packed  whether q, k and v have no batch dimension, as burst_attn_varlen_func's. Its mask
               follows from cu_seqlens.
    """

    softmax_scale: float | None = None
    flash: str = "auto"
    causal: bool = False
    optimize_bwd_comm: bool = True
    deterministic: bool = False
    mask: Masks | None = None
    layout: Layouts = "zigzag"
    strategy: str = "auto"
    backward: str = "auto"
    return_lse: bool = False
    group_bytes: int = strategies.GROUP_BYTES
    softcap: float | None = None
    is_packed: bool = False
    kv_layout: Layouts | None = None


class Ahead(NamedTuple):
    """All calls of a step in chunks. Memory for what they receive is reserved in the first one.

    find_calls     returns the options of each call. Their layouts are Layouts, not names.
    terms          what ranks compare: equal on two ranks only if the options of all calls are
    with_backward  whether the calls will have a backward
    """

    find_calls: Callable[[], Iterable[Options]]
    terms: Mapping[str, Any]
    with_backward: bool


def check_options(options: Options) -> Options:
    """Return the options with numpy's numbers as Python's, since JSON takes no number of numpy.

    Raises TypeError for a value of a wrong type, ValueError for one that is out of range.
    """
    _check_choice("backward", options.backward, _BACKWARDS)
    _check_choice("strategy", options.strategy, ("auto", *strategies.names()))
    for name, layout in (("layout", options.layout), ("kv_layout", options.kv_layout)):
        if isinstance(layout, str):
            _check_choice(name, layout, (*LAYOUTS, Balanced.name))
    if options.layout is None:
        raise TypeError("layout must be a Layout or one for each row, got NoneType")
    if not isinstance(options.flash, str):
        raise TypeError(f"flash must be the name of a kernel, got {options.flash!r}")
    return options._replace(
        softmax_scale=_check_positive("softmax_scale", options.softmax_scale),
        causal=as_bool("causal", options.causal),
        optimize_bwd_comm=as_bool("optimize_bwd_comm", options.optimize_bwd_comm),
        deterministic=as_bool("deterministic", options.deterministic),
        return_lse=as_bool("return_lse", options.return_lse),
        group_bytes=_check_group_bytes(options.group_bytes),
        softcap=_check_positive("softcap", options.softcap),
    )


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {sorted(choices)}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; expected one of {sorted(choices)}")


def _check_positive(name: str, value: Any) -> float | None:
    """Return the value as a float. Kernels assume that scaling keeps the order of scores."""
    return None if value is None else as_positive(name, value)


def _check_group_bytes(value: Any) -> int:
    group_bytes = as_int("group_bytes", value)
    if not 0 <= group_bytes < 1 << 63:
        got = group_bytes if group_bytes < 0 else f"a number of {group_bytes.bit_length()} bits"
        raise ValueError(f"group_bytes must be a number of bytes below 2^63, got {got}")
    return group_bytes


def check_scale(scale: float, softcap: float | None, dtype: torch.dtype) -> None:
    """Raise ValueError if kernels cannot scale and cap the scores of inputs of `dtype`.

    Kernels compute in the accumulator's dtype. They multiply by scale, or by scale / softcap and
    softcap, and some of them by log2(e) as well.
    """
    wide = torch.finfo(accumulator_dtype(dtype))
    most = wide.max * math.log(2)
    if not wide.tiny <= scale <= most:
        kind = "zero" if scale < wide.tiny else "infinite"
        raise ValueError(
            f"softmax_scale={scale} is {kind} in {wide.dtype}, in which {dtype} scores are scaled"
        )
    if softcap is not None and not all(wide.tiny <= x <= most for x in (softcap, scale / softcap)):
        raise ValueError(
            f"softcap={softcap}, or softmax_scale={scale} divided by it, is zero or infinite in "
            f"{wide.dtype}, in which {dtype} scores are capped"
        )
