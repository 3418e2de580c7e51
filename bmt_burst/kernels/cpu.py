"""Torch's own CPU flash attention: any float dtype, any head size, GQA without repeating kv heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec import Spec
from . import NO_BIAS, NO_SOFTCAP
from .reference import grouped
from .tile_by_tile import PlainKernel

_ROWS = 256  # whose scores may be in memory at a time

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuKernel(PlainKernel):
    name = "cpu"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        if spec.biased:
            return NO_BIAS
        if spec.softcap is not None:
            return NO_SOFTCAP
        return None if q.device.type == "cpu" else f"inputs are on {q.device}, not on the CPU"

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def block_forward(self, q, k, v, causal, spec):
        out, lse = _forward(*_heads_first(q, k, v), 0.0, causal, scale=spec.scale)
        out = out.transpose(1, 2)
        suspects = ((lse == 0) | (lse == torch.inf)).flatten(0, 1).any(0).nonzero().squeeze(1)
        if not len(suspects):
            return out, lse
        # a policy of activation checkpointing may hold what the op returned
        out, lse = out.clone(), lse.clone()
        for rows in suspects.split(_ROWS):
            _unhide(out, lse, rows, q, k, spec.scale, causal)
        return out, lse

    def block_backward(self, dout, q, k, v, out, lse, causal, spec):
        grads = _backward(*_heads_first(dout, q, k, v, out), lse, 0.0, causal, scale=spec.scale)
        return tuple(grad.transpose(1, 2) for grad in grads)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """(B, S, H, D) -> (B, H, S, D), views where the last dimension is dense: the op takes that for
    granted.
    """
    return [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in tensors]


def _unhide(
    out: Tensor, lse: Tensor, rows: Tensor, q: Tensor, k: Tensor, scale: float, causal: bool
) -> None:
    """Mends, in place, what the op hides of queries `rows` (N,), whose lse is 0 or inf in some
    head.

    Where all scores are NaN or -inf the op may say out 0 and lse 0, which is what masked rows get,
    of which there are none here; where one is inf, out 0 and lse inf. Few others have an lse of 0.
    """
    scores = grouped(q[:, rows], k.shape[2]) @ grouped(k, k.shape[2]).mT * scale
    if causal:
        scores.masked_fill_(torch.arange(k.shape[1]) > rows.unsqueeze(1), -torch.inf)
    exact = scores.logsumexp(-1).flatten(1, 2)
    # also among other ranks' keys
    lost = ~q[:, rows].isfinite().all(-1).transpose(1, 2) | (exact == torch.inf)
    exact.masked_fill_(lost, torch.nan)
    hidden = ~exact.isfinite()
    lse[:, :, rows] = exact.where(hidden, lse[:, :, rows])
    out[:, rows] = out[:, rows].masked_fill(hidden.transpose(1, 2).unsqueeze(-1), torch.nan)
