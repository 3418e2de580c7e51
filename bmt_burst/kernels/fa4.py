"""FlashAttention-4: the `flash-attn-4` package (CuTe DSL), for Hopper and Blackwell.

Kernels are compiled when a combination of dtype, head size and mask is first used (seconds, cached on disk).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import Kernel, installed, refuses_half

# 4.0.0b36 computes wrong gradients for other sizes, 80 among them, and says nothing.
_HEAD_SIZES = (64, 96, 128, 192, 256)


class Fa4Kernel(Kernel):
    name = "fa4"
    takes_delta = True

    def refuses(self, q: Tensor, k: Tensor, deterministic: bool) -> str | None:
        if not installed("flash_attn.cute"):
            return "the package flash-attn-4 is not installed"
        return refuses_half(q, capability=(9, 0), head_sizes=_HEAD_SIZES)

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def forward(self, q, k, v, *, scale, causal, deterministic):
        out, lse, *_ = _interface()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def backward(self, dout, q, k, v, out, lse, delta=None, *, scale, causal, deterministic):
        options = {"softmax_scale": scale, "causal": causal, "deterministic": deterministic}
        if out is None:
            # The kernel works with rowsum(out * dout) - dlse, where dlse is meant for the gradient of lse.
            out = q.new_zeros(1, 1, 1, q.shape[-1]).expand_as(q)
            options["dlse"] = -delta
        return _interface()._flash_attn_bwd(q, k, v, out, dout, lse.contiguous(), **options)[:3]


@functools.cache
def _interface():
    from flash_attn.cute import interface

    return interface
