"""A stand-in for flash-attn 2's module of this name, over torch's own FlashAttention-2.

It has the functions that ring-flash-attn calls, so this peer is measured without flash-attn 2
(bench/implementations.py). On CPUs torch's CPU kernel takes the place of the CUDA one.

Shapes: B batch, S queries, T keys, H query heads, G kv heads, D head size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bmt_burst import kernels
from bmt_burst.spec import Spec


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, **_unused: Any
) -> tuple[Tensor, Tensor, None, None]:
    """Return out (B, S, H, D), its lse (B, H, S) fp32, and no dropout mask or RNG state.

    q is (B, S, H, D), k and v are (B, T, G, D). Windows, ALiBi and dropout are not passed on.
    """
    out, lse = _kernel(q).block_forward(q, k, v, causal, Spec(softmax_scale))
    return out, lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float,
    causal: bool,
    **_unused: Any,
) -> None:
    """Write the gradients to dq, dk and dv: one copy more than flash-attn 2 makes."""
    inputs = dout, q, k, v, out, softmax_lse.contiguous()
    found = _kernel(q).block_backward(*inputs, causal, Spec(softmax_scale))
    for gradient, into in zip(found, (dq, dk, dv), strict=True):
        into.copy_(gradient)


def _kernel(q: Tensor) -> Any:
    return kernels.load("aten" if q.is_cuda else "cpu")
