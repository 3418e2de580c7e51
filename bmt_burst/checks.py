"""The checks of burst_attn_func's arguments, on one rank. Each raises ValueError or TypeError."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .layout import LAYOUTS
from .rings import Rings

BACKWARDS = ("auto", "q", "kv")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_options(options: dict[str, Any]) -> None:
    for name in ("causal", "optimize_bwd_comm", "deterministic"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name} must be True or False, got {options[name]!r}")
    for name, choices in (("layout", LAYOUTS), ("backward", BACKWARDS)):
        if options[name] not in choices:
            raise ValueError(f"unknown {name} {options[name]!r}; expected one of {sorted(choices)}")
    if not isinstance(options["flash"], str):
        raise TypeError(f"flash must be the name of a kernel, got {options['flash']!r}")
    group_bytes = options["group_bytes"]
    if isinstance(group_bytes, bool) or not isinstance(group_bytes, int) or group_bytes < 0:
        raise ValueError(f"group_bytes must be a whole number of bytes, got {group_bytes!r}")
    if group_bytes >= 1 << 63:
        raise ValueError(f"group_bytes must be below 2^63, got {group_bytes.bit_length()} bits")
    scale = options["softmax_scale"]
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"softmax_scale must be a number or None, got {scale!r}")
    if scale is not None and not 0 < scale <= sys.float_info.max:  # kernels take their largest score for the scaled one
        got = scale if isinstance(scale, float) or scale <= 0 else f"a number of {scale.bit_length()} bits"
        raise ValueError(f"softmax_scale must be positive and finite, got {got}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested or x.layout is not torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got a nested one or layout {x.layout}")
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head size), got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
        if 0 in (x.shape[0], *x.shape[2:]):
            raise ValueError(f"{name} has an empty dimension: shape {tuple(x.shape)}")
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if len({q.device, k.device, v.device}) > 1:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    for dim, meaning in ((0, "batch"), (1, "tokens"), (3, "head size")):
        if q.shape[dim] != k.shape[dim]:
            raise ValueError(f"q and k differ in {meaning}: shapes {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"k has {k.shape[2]} heads, which does not divide q's {q.shape[2]}")


def check_device(rings: Rings, x: Tensor) -> None:
    """Whether the rings can move a tensor that lies where x does."""
    for transport in (rings.inner, rings.outer):
        if transport.size > 1 and x.device.type not in transport.device_types:
            raise ValueError(
                f"inputs are on {x.device}, but the group moves tensors on {sorted(transport.device_types)} only"
            )


def check_shard(rings: Rings, x: Tensor, dim: int) -> None:
    """A rank's part of what is joined along `dim`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"x of shape {tuple(x.shape)} has no dimension {dim!r}")
    check_device(rings, x)
