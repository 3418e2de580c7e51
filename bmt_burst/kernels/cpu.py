"""Torch's CPU flash attention, for any float dtype and any head size.

Kv heads are not repeated for GQA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Spec
from . import NO_SOFTCAP
from .reference import grouped
from .tile_by_tile import PlainKernel

_ROWS = 256  # queries whose scores are in memory at the same time

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
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
        suspects = ((lse == 0) | (lse == torch.inf)).flatten(0, 1).any(0).nonzero().squeeze(1)
        if not len(suspects):
            return out, lse
        # activation checkpointing may keep what the operator returned
        out, lse = out.clone(), lse.clone()
        for rows in suspects.split(_ROWS):
            _unhide(out, lse, rows, q, k, spec.scale, causal)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        grads = _backward(*_heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=spec.scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Return (B, H, S, D) of (B, S, H, D), with a dense last dimension, as the operator assumes.

    The results are views if the last dimension is dense already.
    """
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


def _unhide(
    out: Tensor, lse: Tensor, rows: Tensor, q: Tensor, k: Tensor, scale: float, causal: bool
) -> None:
    """Write NaN and -inf in place where the operator hides them, for queries `rows` (N,).

    `rows` are the queries with an lse of 0 or inf in some head; few correct ones are among them. If
    all scores are NaN or -inf, the operator may return out 0 and lse 0, as for masked queries,
    which do not exist here. If one score is inf, it returns out 0 and lse inf.
    """
    scores = grouped(q[:, rows], k.shape[2]) @ grouped(k, k.shape[2]).mT * scale
    if causal:
        scores.masked_fill_(torch.arange(k.shape[1]) > rows.unsqueeze(1), -torch.inf)
    exact = scores.logsumexp(-1).flatten(1, 2)
    # their result stays NaN, whatever keys other ranks have
    lost = ~q[:, rows].isfinite().all(-1).transpose(1, 2) | (exact == torch.inf)
    exact.masked_fill_(lost, torch.nan)
    hidden = ~exact.isfinite()
    lse[:, :, rows] = exact.where(hidden, lse[:, :, rows])
    out[:, rows] = out[:, rows].masked_fill(hidden.transpose(1, 2).unsqueeze(-1), torch.nan)
