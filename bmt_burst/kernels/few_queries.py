"""Attention of a few queries to many keys, as in decoding.

The keys lie in memory that has room for more. Each query sees a span of them. A kernel may cut the
keys into splits. Its `Partials` merge by lse. Two modules have the functions of this one:

few_queries          torch operators, for CPUs, fp64 and GPUs without Triton
triton_few_queries   Triton, which reads spans and places from the GPU's memory: a CUDA graph of
                     these functions serves all lengths

Letters: B batch, S queries, T keys in memory, H query heads, G kv heads, D head size, N partial
results.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..base.registry import Modules
from ..merging.parts import Partials
from ..spec import Spec
from . import load
from .reference import scores_of

_MODULES = Modules(__package__, {"triton": "triton_few_queries", "torch": "few_queries"})
_SCORES = 1 << 25  # that `attend` keeps in memory, unless one query has more


def has_kernels(q: Tensor) -> bool:
    """Whether Triton's module is for tensors such as q (B, S, H, D)."""
    triton = load("triton")
    return q.is_cuda and not (triton.refuses(Spec(1.0), q, q) or triton.broken())


def find_kernels(q: Tensor) -> ModuleType:
    return _MODULES.load("triton" if has_kernels(q) else "torch")


def put(k: Tensor, v: Tensor, kept_k: Tensor, kept_v: Tensor, places: Tensor) -> None:
    """Write k and v (B, S, G, D) to places (S,) int64, or none at -1, in kept_k and kept_v."""
    here = places >= 0
    for x, kept in ((k, kept_k), (v, kept_v)):
        kept[:, places[here]] = x[:, here]


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, spec: Spec) -> Partials:
    """Return the attention of q (B, S, H, D) to the keys k and v (B, T, G, D) that it sees.

    spans  (S, 2) int64: the first key that a query sees, and the key after its last one. They do
           not fall from a query to the next one.

    A query that sees no key has an lse of -inf. For such a result `merge` does not use out.
    """
    first, last = int(spans[0, 0]), int(spans[-1, 1])
    keys, values = (x[:, first:last].transpose(1, 2).unsqueeze(2) for x in (k, v))  # (B, G, 1, ...)
    at = torch.arange(first, last, device=q.device)
    most = max(1, _SCORES // (len(q) * q.shape[2] * max(1, len(at))))
    outs, lses = [], []
    for rows, (starts, stops) in zip(q.split(most, 1), spans.T.split(most, 1), strict=True):
        rows = rows.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
        seen = (at >= starts.unsqueeze(1)) & (at < stops.unsqueeze(1))
        out, lse = attend_grouped(rows, keys, values, seen, spec)  # (B, G, H / G, S, D)
        outs.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3))
        lses.append(lse.permute(0, 3, 1, 2).flatten(2, 3))
    return torch.cat(outs, 1).unsqueeze(0), torch.cat(lses, 1).unsqueeze(0)


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Return out (..., S, D) and lse (..., S) of q (..., S, D) and keys (..., T, D), written out in
    the accumulator's dtype. `visible` (..., S, T) bool broadcasts. None: all pairs are.
    """
    wide = accumulator_dtype(q.dtype)
    scores = scores_of(q.to(wide), k.to(wide), spec)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    sure = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - sure.unsqueeze(-1)).exp() @ v.to(wide), lse


def merge(parts: Partials, out: Tensor, lse: Tensor) -> None:
    """Fill out (B, S, H, D), of any float dtype, and lse (B, S, H) with the merge of N partial
    results, which add up in their order. A query that sees no key has 0 and -inf.
    """
    outs, lses = parts
    total = lses.logsumexp(0)
    sure = total.masked_fill(total == -torch.inf, 0.0)
    shares = (lses - sure).exp().unsqueeze(-1)  # (N, B, S, H, 1)
    lse.copy_(total)
    out.copy_((outs * shares).sum(0))
