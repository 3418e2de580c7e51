"""Torch's CPU flash attention, for any float dtype and any head size.

Kv heads are not repeated for GQA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.policies import seen_by_policies
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import NO_SOFTCAP, load
from .tile_by_tile import PlainKernel

_forward = seen_by_policies(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel(PlainKernel):
    """Torch's CPU flash attention, with NaN where the operator hides it."""

    name = "cpu"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.softcap is not None:
            return NO_SOFTCAP
        return None if q.device.type == "cpu" else f"inputs are on {q.device}, not on the CPU"

    def block_forward(self, q, k, v, causal, spec):
        out, lse = _forward(*_heads_first(q, k, v), 0.0, causal, scale=spec.scale)
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
            seen = row + 1 if causal else k.shape[1]
            out[:, row], lse[:, :, row] = _compute_row(q[:, row], k[:, :seen], v[:, :seen], spec)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        grads = _backward(*_heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=spec.scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def _compute_row(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Compute out (B, H, D) and lse (B, H) of one query (B, H, D) by the reference."""
    call = KernelCall.whole(1, k.shape[1])
    out, lse = load("reference").forward(q.unsqueeze(1), k, v, call, spec)
    return out.squeeze(1), lse.squeeze(2)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return (B, H, S, D) of (B, S, H, D), with a dense last dimension, as the operator assumes.

    The results are views if the last dimension is dense already.
    """
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]
