"""The tensors of a call. `check_inputs` checks them; later code relies on it.

Values may have another head size than queries and keys, as in multi-head latent attention. The
smaller one is padded with zeros, which changes no score and no output: so kernels and strategies
know one size.

Letters: B batch, S queries of this rank, T keys of this rank, H query heads, G kv heads, D head
size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..base.arguments import DTYPES, check_like_lse, check_tensor
from ..base.autocast import autocast_dtype, cast


class Inputs(NamedTuple):
    """Checked tensors on one device.

    q           (B, S, H, D)
    k, v        (B, T, G, D) in q's dtype; G divides H
    sinks       (H,) fp32 (fp64 for fp64 inputs), or None
    autocast    the dtype that autocast cast q, k and v to, or None if it is off
    head_size   the head size of q and k as they were passed. D is the larger one of these two.
    value_size  the head size of v as it was passed, and so of out
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    autocast: torch.dtype | None
    head_size: int
    value_size: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors."""
        tensors = (self.q, self.k, self.v, self.sinks)
        return tuple(x for x in tensors if x is not None)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, is_packed: bool) -> Inputs:
    """Return the inputs with a batch dimension, in the dtype of autocast and of one head size.

    is_packed  whether q, k and v are packed documents, (tokens, heads, head size)

    Raises TypeError or ValueError for tensors that do not fit or do not fit together.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_one(name, x, is_packed)
    if is_packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    # A norm or a rotary embedding may leave some of them in fp32.
    if autocast := autocast_dtype(q):
        q, k, v = cast(q, autocast), cast(k, autocast), cast(v, autocast)
    _check_together(q, k, v)
    _check_sinks(sinks, q)
    return _pad_heads(Inputs(q, k, v, sinks, autocast, q.shape[-1], v.shape[-1]))


def _pad_heads(inputs: Inputs) -> Inputs:
    """Return the inputs with zeros where q and k, or v, have less than the larger head size."""
    missing = inputs.value_size - inputs.head_size
    if not missing:
        return inputs
    if missing < 0:
        return inputs._replace(v=functional.pad(inputs.v, (0, -missing)))
    q, k = (functional.pad(x, (0, missing)) for x in (inputs.q, inputs.k))
    return inputs._replace(q=q, k=k)


def _check_one(name: str, x: Tensor, is_packed: bool) -> None:
    check_tensor(name, x)
    if x.dim() != (3 if is_packed else 4):
        expected = "packed, (tokens" if is_packed else "(batch, tokens"
        other = {3: "burst_attn_varlen_func takes packed documents", 4: "burst_attn_func batches"}
        hint = f": {other[x.dim()]}" if x.dim() in other else ""
        raise ValueError(
            f"{name} must be {expected}, heads, head size), got shape {tuple(x.shape)}{hint}"
        )
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    *batch, _tokens, heads, head_size = x.shape
    if 0 in (*batch, heads, head_size):
        raise ValueError(
            f"{name} must have batch, heads and head size above 0, got shape {tuple(x.shape)}"
        )


def _check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}: cast them, "
            "or call under torch.autocast"
        )
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "k and v must have the same batch, tokens and heads, "
            f"got shapes {tuple(k.shape)} and {tuple(v.shape)}"
        )
    for dim, meaning in ((0, "batch"), (3, "head size")):
        if q.shape[dim] != k.shape[dim]:
            raise ValueError(
                f"q and k differ in {meaning}: shapes {tuple(q.shape)} and {tuple(k.shape)}"
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which does not divide q's {q.shape[2]}")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    check_tensor("sinks", sinks)
    if sinks.shape != q.shape[2:3]:
        several = ": several sinks of a head equal one, sinks.logsumexp(0)"
        raise ValueError(
            f"sinks must be ({q.shape[2]},), one for each query head, "
            f"got shape {tuple(sinks.shape)}{several if sinks.shape[1:] == q.shape[2:3] else ''}"
        )
    check_like_lse("sinks", sinks, q)


def unpack_tensor(name: str, x: Tensor, count: int) -> tuple[Tensor, ...]:
    """Return the tensors that are packed in x (..., count, heads, D), as views.

    Autograd joins their gradients once. Raises TypeError unless x is a tensor, ValueError unless it
    holds `count` tensors.
    """
    check_tensor(name, x)
    if x.dim() < 4 or x.shape[-3] != count:
        raise ValueError(
            f"{name} must be (..., tokens, {count}, heads, head size), got shape {tuple(x.shape)}"
        )
    return x.unbind(-3)
