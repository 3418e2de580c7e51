"""The checks of burst_attn_func's arguments, on one rank. Each raises ValueError or TypeError."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .. import strategies
from ..base.arguments import DTYPES, as_bool, as_float, as_int, check_tensor
from ..base.autocast import autocast
from ..base.dtypes import accumulator_dtype
from ..sequence.layout import LAYOUTS, Balanced

BACKWARDS = ("auto", "q", "kv")


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options with Python's own numbers where numpy's were given, as ranks can tell each other."""
    checked = dict(options)
    for name in ("causal", "optimize_bwd_comm", "deterministic", "return_lse"):
        checked[name] = as_bool(name, options[name])
    for name, choices in (("backward", BACKWARDS), ("strategy", ("auto", *strategies.names()))):
        _check_choice(name, options[name], choices)
    if isinstance(options["layout"], str):
        _check_choice("layout", options["layout"], (*LAYOUTS, Balanced.name))
    if not isinstance(options["flash"], str):
        raise TypeError(f"flash must be the name of a kernel, got {options['flash']!r}")
    checked["group_bytes"] = group_bytes = as_int("group_bytes", options["group_bytes"])
    if not 0 <= group_bytes < 1 << 63:
        got = group_bytes if group_bytes < 0 else f"a number of {group_bytes.bit_length()} bits"
        raise ValueError(f"group_bytes must be a number of bytes below 2^63, got {got}")
    if options["softmax_scale"] is not None:
        checked["softmax_scale"] = scale = as_float("softmax_scale", options["softmax_scale"])
        if not 0 < scale < math.inf:  # kernels take their largest score for the scaled one
            raise ValueError(f"softmax_scale must be positive and finite, got {scale}")
    if options["softcap"] is not None:
        checked["softcap"] = softcap = as_float("softcap", options["softcap"])
        if not 0 < softcap < math.inf:
            raise ValueError(
                f"softcap must be positive and finite, or None for none, got {softcap}"
            )
    return checked


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {sorted(choices)}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}; expected one of {sorted(choices)}")


def cast_inputs(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the dtype of autocast: a norm or a rotary embedding may have left some
    of them in fp32.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
    return autocast(q), autocast(k), autocast(v)


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors (T, heads, D) of packed sequences as (1, T, heads, D)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(
                f"{name} must be packed, (tokens, heads, head size), got shape {tuple(x.shape)}"
            )
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)


def check_scale(scale: float | None, dtype: torch.dtype) -> None:
    """Kernels multiply scores of inputs of `dtype` in the accumulator's dtype, some by scale *
    log2(e).
    """
    if scale is None:
        return
    wide = torch.finfo(accumulator_dtype(dtype))
    if not wide.tiny <= scale <= wide.max * math.log(2):
        kind = "zero" if scale < wide.tiny else "infinite"
        raise ValueError(
            f"softmax_scale={scale} is {kind} in {wide.dtype}, in which {dtype} scores are scaled"
        )


def check_softcap(softcap: float | None, scale: float, dtype: torch.dtype) -> None:
    """Kernels multiply by scale / softcap, and by softcap or softcap * log2(e), in the
    accumulator's dtype.
    """
    if softcap is None:
        return
    wide = torch.finfo(accumulator_dtype(dtype))
    if not all(wide.tiny <= x <= wide.max * math.log(2) for x in (softcap, scale / softcap)):
        raise ValueError(
            f"softcap={softcap}, or softmax_scale={scale} divided by it, is zero or infinite in {wide.dtype}, in which "
            f"{dtype} scores are capped"
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, tokens, heads, head size), got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if 0 in (x.shape[0], *x.shape[2:]):
            raise ValueError(f"{name} has an empty dimension: shape {tuple(x.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
        )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    for dim, meaning in ((0, "batch"), (1, "tokens"), (3, "head size")):
        if q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q and k differ in {meaning}: shapes {tuple(q.shape)} and {tuple(k.shape)}"
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which does not divide q's {q.shape[2]}")


def check_bias(bias: Tensor | None, scores: Any, q: Tensor) -> None:
    """Whether a bias is a table for the heads of q; one comes with scores and only with them."""
    if (bias is None) != (scores is None):
        what = "scores without a bias" if bias is None else "a bias alone"
        raise ValueError(f"scores and bias go together, got {what}")
    if bias is None:
        return
    check_tensor("bias", bias)
    if bias.dim() != 2 or bias.shape[1] != q.shape[2]:
        raise ValueError(f"bias must be (rows, {q.shape[2]} heads), got shape {tuple(bias.shape)}")
    if bias.dtype != (wide := accumulator_dtype(q.dtype)):
        raise TypeError(f"bias must be {wide} for {q.dtype} inputs, got {bias.dtype}")
    if bias.device != q.device:
        raise ValueError(f"bias must be where q is, on {q.device}, got {bias.device}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Whether sinks are a number for each head of q."""
    if sinks is None:
        return
    check_tensor("sinks", sinks)
    if sinks.shape != q.shape[2:3]:
        raise ValueError(
            f"sinks must be ({q.shape[2]},), one for each query head, got shape {tuple(sinks.shape)}"
        )
    if sinks.dtype != (wide := accumulator_dtype(q.dtype)):
        raise TypeError(f"sinks must be {wide} for {q.dtype} inputs, got {sinks.dtype}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be where q is, on {q.device}, got {sinks.device}")


def unpack_tensor(name: str, x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Views of what is packed in x (..., count, heads, D); their gradients are put together once.

    Raises TypeError for what is no tensor, ValueError if it does not hold so many.
    """
    check_tensor(name, x)
    if x.dim() < 4 or x.shape[-3] != count:
        raise ValueError(
            f"{name} must be (..., tokens, {count}, heads, head size), got shape {tuple(x.shape)}"
        )
    return x.unbind(-3)
