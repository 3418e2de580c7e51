"""FlashAttention-2: the `flash-attn` package, versions 2.6 to 2.8, for Ampere and newer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from . import Kernel, import_failure, installed, refuses_half


class Fa2Kernel(Kernel):
    name = "fa2"

    def refuses(self, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
        if not installed("flash_attn_2_cuda"):
            return "the package flash-attn (2.6 to 2.8) is not installed"
        return refuses_half(q, capability=(8, 0), head_sizes=range(8, 257, 8))

    def broken(self) -> str | None:
        return import_failure("flash-attn", _calls)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q, k, v, *, scale, causal, deterministic):
        forward, options = _calls()[0]
        results = forward(q, k, v, 0.0, scale, causal, **options, return_softmax=False)
        # 2.6 returns padded copies of the inputs between out and lse.
        return results[0], results[1] if len(results) == 4 else results[5]

    def backward(self, dout, q, k, v, out, lse, delta=None, *, scale, causal, deterministic):
        backward, options = _calls()[1]
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        options = {**options, "deterministic": deterministic}
        backward(dout, q, k, v, out, lse.contiguous(), *grads, 0.0, scale, causal, **options)
        return grads


@functools.cache
def _calls() -> tuple[tuple[Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Forward and backward."""
    return _call("_flash_attn_forward"), _call("_flash_attn_backward")


def _call(name: str) -> tuple[Any, dict[str, Any]]:
    """A function of the package and its options for plain attention, named as the installed version names them."""
    from flash_attn import flash_attn_interface

    function = getattr(flash_attn_interface, name)
    options: dict[str, Any] = {"softcap": 0.0, "alibi_slopes": None}
    if "window_size_left" in inspect.signature(function).parameters:  # since 2.7
        return function, {**options, "window_size_left": -1, "window_size_right": -1}
    return function, {**options, "window_size": (-1, -1)}
