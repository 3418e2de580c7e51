"""Attention of a few queries to many keys, as in decoding.

The query heads of a kv head are rows, so that keys are read once. Keys are cut into splits, which a
kernel takes as a batch, so that even one query fills a GPU. Partial results merge by lse, in the
accumulator's dtype.

Letters: B batch, S queries, T keys, H query heads, G kv heads, D head size, N partial results.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.tile import KernelCall
from ..spec import Spec
from . import Kernel, pick

# Out (N, B, S, H, D) and lse (N, B, H, S), natural log, in the accumulator's dtype.
Partials = tuple[Tensor, Tensor]

_FEWEST_KEYS = 512  # of a split
_STEP = 16  # by which splits grow, in keys
_MOST_TILES = 256  # of rows, heads and splits: about two for each processor of an H100
_ROWS = 128  # of a tile
_SCORES = 1 << 25  # that `attend_masked` keeps in memory, unless one query has more


def attend_whole(q: Tensor, k: Tensor, v: Tensor, flash: str, spec: Spec) -> list[Partials]:
    """Return the attention of q (B, S, H, D), which sees all keys k and v (B, T, G, D).

    flash  the name of a kernel, as burst_attn_func's. It computes splits of equal length. The last
           keys, too few for a longer split, are computed without it. So a kernel sees a new shape
           now and then, and not with each token.

    Raises ValueError if that kernel cannot compute such inputs.
    """
    queries, tokens, groups = q.shape[1], k.shape[1], k.shape[2]
    rows = q.unflatten(2, (groups, -1)).transpose(2, 3).flatten(1, 2)  # (B, S * H / G, G, D)
    kernel = pick(flash, rows, k, spec)
    tiles = len(q) * groups * -(-rows.shape[1] // _ROWS)
    splits = max(1, min(_MOST_TILES // tiles, tokens // _FEWEST_KEYS))
    size = tokens // (splits * _STEP) * _STEP if tokens >= _FEWEST_KEYS else 0
    found, whole = [], splits * size
    if whole:
        out, lse = _attend_in_splits(kernel, rows, k[:, :whole], v[:, :whole], splits, spec)
        out = out.unflatten(2, (queries, -1)).transpose(3, 4).flatten(3, 4)
        lse = lse.unflatten(3, (queries, -1)).transpose(3, 4).flatten(2, 3)
        found.append((out.to(accumulator_dtype(q.dtype)), lse))
    if whole < tokens:
        found.append(attend_masked(q, k[:, whole:], v[:, whole:], None, spec))
    return found


def _attend_in_splits(
    kernel: Kernel, rows: Tensor, k: Tensor, v: Tensor, splits: int, spec: Spec
) -> Partials:
    """Return the attention of rows (B, R, G, D) to each of equal splits of the keys: (splits, B, R,
    G, D) and (splits, B, G, R).
    """
    call = _whole_call(rows.shape[1], k.shape[1] // splits)
    if splits == 1:
        out, lse = kernel.forward(rows, k, v, call, spec)
        return out.unsqueeze(0), lse.unsqueeze(0)
    found = []
    for row, *keys in zip(rows, k, v, strict=True):  # the splits of several rows are no view
        cut_k, cut_v = (x.unflatten(0, (splits, -1)) for x in keys)
        same = row.expand(splits, *row.shape).contiguous()
        found.append(kernel.forward(same, cut_k, cut_v, call, spec))
    outs, lses = zip(*found, strict=True)
    return torch.stack(outs, 1), torch.stack(lses, 1)


# kernels keep their tables with a call, and layers repeat it
_whole_call = functools.lru_cache(maxsize=64)(KernelCall.whole)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: Spec) -> Partials:
    """Return the attention of q (B, S, H, D) to the few keys k and v (B, T, G, D) that it sees.

    visible  (S, T) bool, or None if all queries see all keys

    Scores are kept in memory, those of some queries at a time.
    """
    outs, lses = [], []
    keys, values = (x.transpose(1, 2).unsqueeze(2) for x in (k, v))  # (B, G, 1, T, D)
    most = max(1, _SCORES // (len(q) * q.shape[2] * k.shape[1]))
    for start in range(0, q.shape[1], most):
        some = slice(start, start + most)
        rows = q[:, some].unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
        seen = None if visible is None else visible[some]
        out, lse = attend_grouped(rows, keys, values, seen, spec)  # (B, G, H / G, S, D)
        outs.append(out.permute(0, 3, 1, 2, 4).flatten(2, 3))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, 1).unsqueeze(0), torch.cat(lses, 2).unsqueeze(0)


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Return out (..., S, D) and lse (..., S) of q (..., S, D) and keys (..., T, D), written out in
    the accumulator's dtype. `visible` (..., S, T) bool broadcasts. None: all pairs are.
    """
    wide = accumulator_dtype(q.dtype)
    scores = q.to(wide) @ k.to(wide).mT * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1)
    sure = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - sure.unsqueeze(-1)).exp() @ v.to(wide), lse


def merge(parts: Sequence[Partials], q: Tensor) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D) and lse (B, H, S) for the keys of all parts, which add up in their
    order. A query that sees none has 0 and -inf.
    """
    if not parts:
        wide, (batch, queries, heads, _) = accumulator_dtype(q.dtype), q.shape
        lse = torch.full((batch, heads, queries), -torch.inf, dtype=wide, device=q.device)
        return torch.zeros_like(q, dtype=wide), lse
    outs, lses = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
    if len(outs) == 1:
        return outs[0], lses[0]
    lse = lses.logsumexp(0)
    sure = lse.masked_fill(lse == -torch.inf, 0.0)
    shares = (lses - sure).exp().transpose(2, 3).unsqueeze(-1)  # (N, B, S, H, 1)
    return (outs * shares).sum(0), lse
