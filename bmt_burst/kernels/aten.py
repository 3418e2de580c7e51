"""Torch's built-in CUDA flash attention (FlashAttention-2), called through torch.ops.aten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.policies import seen_by_policies
from ..spec import Spec
from . import refuses_half
from .tile_by_tile import PlainKernel

_forward = seen_by_policies(torch.ops.aten._flash_attention_forward)
_backward = torch.ops.aten._flash_attention_backward


class AtenKernel(PlainKernel):
    """Torch's FlashAttention-2."""

    name = "aten"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return refuses_half(spec, q, capability=(8, 0), head_sizes=range(8, 257, 8))

    def block_forward(self, q, k, v, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = _forward(q, k, v, *sizes, 0.0, causal, False, scale=spec.scale)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        unused = q.new_empty(2, dtype=torch.int64), q.new_empty(0)  # dropout's RNG state
        with _deterministic(spec.deterministic):
            return _backward(
                dout, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *unused, scale=spec.scale
            )


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Set torch's global switch for deterministic algorithms, which the operator reads."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(2 if wanted and not before else before)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
