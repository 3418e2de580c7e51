"""The specification of all kernels: attention written out, for any float dtype and device.

It is slow and keeps all S x T scores in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.span import length
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel


class ReferenceKernel(Kernel):
    """Attention written out. It computes and returns fp32, or fp64 for fp64 inputs."""

    name = "reference"

    def refuses(self, spec: Spec, q: Tensor, k: Tensor) -> str | None:
        return "meta tensors have no values" if q.is_meta else None

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulator_dtype(dtype)

    def forward(self, q, k, v, call, spec, added=None):
        """Compute `Kernel.forward`. `added` (S, T, H) are added to the scores."""
        hidden = ~visible(call, q.device)
        q, k, v = (_grouped(x, k.shape[2]) for x in (q, k, v))
        scores = scores_of(q, k, spec, added).masked_fill(hidden, -torch.inf)
        lse = scores.logsumexp(-1)
        lse.masked_fill_(lse == torch.inf, torch.nan)  # as softmax is if a score is inf
        probs = (scores - lse.unsqueeze(-1)).exp().masked_fill(hidden, 0.0)
        return _ungrouped(probs @ v), lse.flatten(1, 2)

    def backward(self, dout, q, k, v, out, lse, delta, call, spec):
        return self.gradients(dout, q, k, v, out, lse, delta, call, spec)[:3]

    def gradients(self, dout, q, k, v, out, lse, delta, call, spec, added=None):
        """Compute `Kernel.backward`, and dS (B, H, S, T), 0 for hidden pairs. See `forward`."""
        groups = k.shape[2]
        if delta is None:
            delta = (out.to(lse.dtype) * dout).sum(-1).transpose(1, 2)
        dout, q, k, v = (_grouped(x, groups) for x in (dout, q, k, v))
        lse, delta = (x.unflatten(1, (groups, -1)).unsqueeze(-1) for x in (lse, delta))
        scores = scores_of(q, k, spec, added)
        probs = (scores - lse).exp().masked_fill(~visible(call, q.device), 0.0)
        dprobs = dout @ v.mT
        dscores = probs * (dprobs - delta)
        if spec.softcap is not None:
            dscores = dscores * (1 - (scores / spec.softcap).square())  # the derivative of tanh
        dq = dscores @ k * spec.scale
        dk = (dscores.mT @ q).sum(2, keepdim=True) * spec.scale
        dv = (probs.mT @ dout).sum(2, keepdim=True)
        return _ungrouped(dq), _ungrouped(dk), _ungrouped(dv), dscores.flatten(1, 2)


def scores_of(q: Tensor, k: Tensor, spec: Spec, added: Tensor | None = None) -> Tensor:
    """Compute the scores (B, G, H / G, S, T) of grouped q and k, hidden pairs included."""
    scores = q @ k.mT * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if added is None:
        return scores
    return scores + added.to(q.dtype).permute(2, 0, 1).unflatten(0, scores.shape[1:3])


def visible(call: KernelCall, device: torch.device | str | None = None) -> Tensor:
    """Return (S, T) bool: True where the query (row) sees the key (column)."""
    result = torch.zeros(call.q_tokens, call.kv_tokens, dtype=torch.bool, device=device)
    for q, kv in call.tiles:
        # indices counted back from the last token
        a, b = (torch.arange(-length(span), 0, device=device) for span in (q, kv))
        ahead = b - a.unsqueeze(1)
        inside = torch.ones_like(ahead, dtype=torch.bool)
        if call.left is not None:
            inside &= ahead >= -call.left
        if call.right is not None:
            inside &= ahead <= call.right
        result[slice(*q), slice(*kv)] = inside
    return result


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Reshape (B, S, H, D) to (B, G, H / G, S, D), in the accumulator's dtype."""
    return x.to(accumulator_dtype(x.dtype)).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _ungrouped(x: Tensor) -> Tensor:
    """Reshape (B, G, H / G, S, D) to (B, S, H, D)."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
