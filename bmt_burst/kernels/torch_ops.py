"""Torch's own attention operators, called through torch.ops.aten. They know no bands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.policies import seen_by_policies
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import NO_SOFTCAP, load, refuses_half
from .packed import make_dense
from .tile_by_tile import PlainKernel

_aten = torch.ops.aten
_flash = seen_by_policies(_aten._flash_attention_forward)
_cudnn = seen_by_policies(_aten._scaled_dot_product_cudnn_attention)
_cpu = seen_by_policies(_aten._scaled_dot_product_flash_attention_for_cpu)


class AtenKernel(PlainKernel):
    """Torch's FlashAttention-2 for CUDA."""

    name = "aten"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return refuses_half(spec, q, (8, 0))

    def block_forward(self, q, k, v, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        out, lse, *_ = _flash(q, k, v, *sizes, 0.0, causal, False, scale=spec.scale)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        unused = q.new_empty(2, dtype=torch.int64), q.new_empty(0)  # dropout's RNG state
        inputs = dout, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, *unused
        with _deterministic(spec.deterministic):
            return _aten._flash_attention_backward(*inputs, scale=spec.scale)


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Set torch's global switch for deterministic algorithms, which the operator reads."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(2 if wanted and not before else before)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


class CudnnKernel(PlainKernel):
    """cuDNN's attention, not for blocks of one key. It ignores torch.backends.cudnn.enabled."""

    name = "cudnn"
    fewest_keys = 2

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.deterministic:
            return "its backward is not deterministic"
        # torch computes gradients with cuDNN up to these head sizes
        hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
        most = 256 if hopper and torch.backends.cudnn.version() >= 91000 else 128
        return refuses_half(spec, q, (9, 0), most)

    def block_forward(self, q, k, v, causal, spec):
        qkv = _heads_first(q, k, v)
        out, lse, *_ = _cudnn(*qkv, None, True, 0.0, causal, False, scale=spec.scale)
        return out.transpose(1, 2), lse.squeeze(-1)

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        sizes = None, None, q.shape[1], k.shape[1]
        # Torch keeps cuDNN's graphs by the strides of q, k and v. A call whose out and dout have
        # other strides than those of the first call with such a graph gets wrong gradients.
        inputs = _heads_first(dout.contiguous(), q, k, v, out.contiguous())
        # dropout's RNG state
        unused = q.new_empty(1, dtype=torch.int64), q.new_empty(1, dtype=torch.int64)
        options = *unused, None, *sizes, 0.0, causal
        backward = _aten._scaled_dot_product_cudnn_attention_backward
        lse = lse.contiguous().unsqueeze(-1)
        return _heads_first(*backward(*inputs, lse, *options, scale=spec.scale))


class CpuKernel(PlainKernel):
    """Torch's CPU flash attention, with NaN where the operator hides it.

    It takes any float dtype and any head size, and does not repeat kv heads for GQA. It assumes a
    dense last dimension.
    """

    name = "cpu"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.softcap is not None:
            return NO_SOFTCAP
        return None if q.device.type == "cpu" else f"inputs are on {q.device}, not on the CPU"

    def block_forward(self, q, k, v, causal, spec):
        out, lse = _cpu(*_heads_first(*map(make_dense, (q, k, v))), 0.0, causal, scale=spec.scale)
        out = out.transpose(1, 2)
        # If all scores of a query are NaN or -inf, the operator may return an out and an lse of 0,
        # as for masked queries, which do not exist here. If one score is inf, it returns an out of
        # 0 and an lse of inf. Few correct queries have an lse of 0 in some head.
        suspects = ((lse == 0) | (lse == torch.inf)).flatten(0, 1).any(0).nonzero().squeeze(1)
        if not len(suspects):
            return out, lse
        # activation checkpointing may keep what the operator returned
        out, lse = out.clone(), lse.clone()
        for row in suspects.tolist():
            query, seen = slice(row, row + 1), row + 1 if causal else k.shape[1]
            inputs = q[:, query], k[:, :seen], v[:, :seen], KernelCall.whole(1, seen), spec
            out[:, query], lse[:, :, query] = load("reference").forward(*inputs)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        inputs = _heads_first(*map(make_dense, (dout, q, k, v, out)))
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _heads_first(*backward(*inputs, lse, 0.0, causal, scale=spec.scale))


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views (B, H, S, D) of (B, S, H, D), or back."""
    return tuple(x.transpose(1, 2) for x in tensors)
