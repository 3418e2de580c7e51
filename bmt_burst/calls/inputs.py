"""The tensors of a call. `check_inputs` checks them; later code relies on it.

Values may have another head size than queries and keys, as in multi-head latent attention. The
smaller one is padded with zeros, which changes no score and no output: so kernels and strategies
know one size.

Letters: B batch, H query heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..base.arguments import DTYPES, check_like_lse, check_tensor
from ..base.autocast import autocast_dtype, cast


class Form(NamedTuple):
    """The changes that tensors of a call get before it computes.

    is_packed   whether they are packed documents, (tokens, heads, head size)
    autocast    the dtype that autocast casts them to, or None if it is off
    head_size   the head size of q and k
    value_size  the head size of v, and so of out
    changes     whether any tensor changes
    """

    is_packed: bool
    autocast: torch.dtype | None
    head_size: int
    value_size: int
    changes: bool

    def prepare(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors (B, tokens, heads, D) in the dtype of autocast, with zeros where they have
        less than the larger head size.
        """
        if self.is_packed:
            tensors = tuple(x.unsqueeze(0) for x in tensors)
        if self.autocast:
            tensors = tuple(cast(x, self.autocast) for x in tensors)
        if self.head_size == self.value_size:
            return tensors
        size = max(self.head_size, self.value_size)
        return tuple(functional.pad(x, (0, size - x.shape[-1])) for x in tensors)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, is_packed: bool) -> Form:
    """Return the form of a call's tensors. Raises TypeError or ValueError if they do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_one(name, x, is_packed)
    autocast, sizes = autocast_dtype(q), (q.shape[-1], v.shape[-1])
    changes = is_packed or autocast is not None or sizes[0] != sizes[1]
    form = Form(is_packed, autocast, *sizes, changes)
    q, k, v = form._replace(value_size=form.head_size).prepare(q, k, v)
    _check_together(q, k, v)
    check_sinks(sinks, q)
    return form


def _check_one(name: str, x: Tensor, is_packed: bool) -> None:
    check_tensor(name, x)
    shape = tuple(x.shape)
    if x.dim() != (3 if is_packed else 4):
        expected = "packed, (tokens" if is_packed else "(batch, tokens"
        other = {3: "burst_attn_varlen_func takes packed documents", 4: "burst_attn_func batches"}
        hint = f": {other[x.dim()]}" if x.dim() in other else ""
        raise ValueError(f"{name} must be {expected}, heads, head size), got shape {shape}{hint}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    *batch, _tokens, heads, head_size = shape
    if 0 in (*batch, heads, head_size):
        raise ValueError(f"{name} must have batch, heads and head size above 0, got shape {shape}")


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        got = f"{q.dtype}, {k.dtype} and {v.dtype}: cast them, or call under torch.autocast"
        raise TypeError(f"q, k and v must have one dtype, got {got}")
    if not q.device == k.device == v.device:
        got = f"{q.device}, {k.device} and {v.device}"
        raise ValueError(f"q, k and v must be on one device, got {got}")
    if k.shape[:3] != v.shape[:3]:
        got = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"k and v must have the same batch, tokens and heads, got shapes {got}")
    for dim, meaning in ((0, "batch"), (3, "head size")):
        if q.shape[dim] != k.shape[dim]:
            got = f"{tuple(q.shape)} and {tuple(k.shape)}"
            raise ValueError(f"q and k differ in {meaning}: shapes {got}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which does not divide q's {q.shape[2]}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise TypeError or ValueError unless sinks are None or fit to q (..., H, D)."""
    if sinks is None:
        return
    check_tensor("sinks", sinks)
    if sinks.shape != q.shape[2:3]:
        several = ": several sinks of a head equal one, sinks.logsumexp(0)"
        hint = several if sinks.shape[1:] == q.shape[2:3] else ""
        expected, got = f"({q.shape[2]},), one for each query head", tuple(sinks.shape)
        raise ValueError(f"sinks must be {expected}, got shape {got}{hint}")
    check_like_lse("sinks", sinks, q)


def describe_inputs(form: Form, q: Tensor, k: Tensor, sinks: Tensor | None) -> dict[str, Any]:
    """Return what ranks compare of prepared tensors."""
    return {
        "batch": q.shape[0],
        "q heads": q.shape[2],
        "kv heads": k.shape[2],
        "head size": form.head_size,
        "head size of v": form.value_size,
        "autocast": form.autocast and str(form.autocast),
        "dtype": str(q.dtype),
        "device type": q.device.type,
        "sinks": sinks is not None,
    }


def unpack_tensor(name: str, x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the tensors that are packed in x (..., count, heads, D), as views, whose gradients
    autograd joins once. Raises TypeError or ValueError unless x holds `count` tensors.
    """
    check_tensor(name, x)
    if x.dim() < 4 or x.shape[-3] != count:
        expected = f"(..., tokens, {count}, heads, head size)"
        raise ValueError(f"{name} must be {expected}, got shape {tuple(x.shape)}")
    return x.unbind(-3)
