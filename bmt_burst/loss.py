"""Cross entropy over a shard of a sequence, together with the projection to the vocabulary or after
it.

A mean over a shard is not a share of the mean over the sequence: shards differ in valid targets,
and one may have none. So the loss of a shard is a sum and a count; the caller divides by the count
over the global batch.

Letters: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .base.arguments import DTYPES, check_tensor
from .base.autocast import autocast
from .base.autograd import check_first_derivative
from .base.compiled import fused_on_gpus, not_compiled
from .base.dtypes import accumulator_dtype
from .sequence.layout import IGNORE_INDEX, SIGNED

# Logits exist in tiles of so many tokens and entries of the vocabulary: 128 MiB in bf16; on CPUs
# there is one in fp32 beside it, on GPUs that lives in registers. The gradient of the hidden states
# is added up over the entries, that of the weights over the tokens, which therefore come in few
# parts.
_TILE_TOKENS = 1 << 15
_TILE_ENTRIES = 1 << 11


@not_compiled
def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum` of the logits hidden @ weight^T, without ever holding them all.

    hidden: (..., S, E); weight: (V, E), or several such whose rows count in turn, as if they were
    one; labels: (..., S) int64; all on one device. hidden and weight are of one dtype, fp16, bf16,
    fp32 or fp64; under autocast they are cast as F.linear casts, and gradients come back in their
    own. Logits are rounded to that dtype, as a linear layer's, and taken in fp32 (fp64). The
    backward forms them once more and goes back through each tile: with P = softmax(logits), dlogits
    = dloss (P - onehot(label)), and 0 for tokens without a target. Differentiable (once) in hidden
    and weight; the backward raises RuntimeError with create_graph.

    Raises TypeError for wrong dtypes and for tensors without values of their own, ValueError for
    shapes or devices that do not go together and for a label outside the vocabulary; on GPUs, where
    the host does not wait for it, that last one is a device-side assertion.
    """
    weights = weight if isinstance(weight, list | tuple) else [weight]
    for name, x in (("hidden", hidden), *(("weight", part) for part in weights)):
        _check_floats(name, x)
    hidden, *weights = map(autocast, (hidden, *weights))
    for part in weights:
        _check_weight(hidden, part)
    _check_labels(labels, hidden, sum(map(len, weights)))
    total = _LinearCrossEntropySum.apply(hidden.flatten(0, -2), labels.flatten(), *weights)
    return total, count_targets(labels)


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
        wide = accumulator_dtype(hidden.dtype)
        lse = torch.full(labels.shape, -torch.inf, dtype=wide, device=hidden.device)
        target = torch.zeros_like(lse)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _split_range(len(labels), _TILE_TOKENS):
                for part, entries, first in _tiles(weights):
                    logits = hidden[rows] @ weights[part][entries].T
                    lse[rows] = torch.logaddexp(lse[rows], _logsumexp(logits))
                    column, inside = _columns(labels[rows] - first, logits.shape[1])
                    target[rows] += logits.gather(1, column).squeeze(1).where(inside, 0.0)
            ctx.save_for_backward(hidden, labels, lse, *weights)
            return (lse - target).where(labels != IGNORE_INDEX, 0.0).sum()

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx, dtotal: Tensor):
        check_first_derivative("linear_cross_entropy_sum")
        hidden, labels, lse, *weights = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            factor = dtotal.to(lse.dtype) * (labels != IGNORE_INDEX)
            wanted, _, *of_weights = ctx.needs_input_grad
            dhidden, dweights = _gradients(
                hidden, weights, labels, lse, factor, (wanted, *of_weights)
            )
        return dhidden, None, *dweights


def _gradients(
    hidden: Tensor,
    weights: Sequence[Tensor],
    labels: Tensor,
    lse: Tensor,
    factor: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """dhidden (N, E) and dweights, each if it is wanted; `factor` (N,) is the gradient of each
    token's loss.
    """
    dhidden = torch.empty_like(hidden) if wanted[0] else None
    dweights = [
        torch.zeros_like(x) if is_wanted else None
        for x, is_wanted in zip(weights, wanted[1:], strict=True)
    ]
    for rows in _split_range(len(labels), _TILE_TOKENS):
        total = torch.zeros_like(hidden[rows], dtype=lse.dtype)
        for part, entries, first in _tiles(weights):
            weight, dweight = weights[part][entries], dweights[part]
            dlogits = _logits_gradient(
                hidden[rows] @ weight.T, lse[rows], labels[rows] - first, factor[rows]
            )
            if dhidden is not None:
                total += dlogits @ weight
            if dweight is not None:
                dweight[entries] += dlogits.T @ hidden[rows]
        if dhidden is not None:
            dhidden[rows] = total
    return dhidden, dweights


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of token losses and number of valid targets.

    logits: (..., S, V), fp16, bf16, fp32 or fp64, taken in fp32 (fp64); labels: (..., S) int64,
    IGNORE_INDEX (-100) where there is no target. Returns fp32 (fp64) and int64 scalars; 0 and 0
    without targets, with zero gradients. Raises as linear_cross_entropy_sum.
    """
    _check_floats("logits", logits)
    if logits.dim() < 2:
        raise ValueError(
            f"logits must be (..., tokens, vocabulary), got shape {tuple(logits.shape)}"
        )
    _check_labels(labels, logits, logits.shape[-1])
    logits = logits.flatten(0, -2).to(accumulator_dtype(logits.dtype))
    total = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, count_targets(labels)


def count_targets(labels: Tensor) -> Tensor:
    """Number of valid targets: int64 scalar. Raises TypeError for labels of a dtype without
    negative numbers.
    """
    check_tensor("labels", labels)
    if labels.dtype not in SIGNED:
        raise TypeError(f"labels need a signed integer dtype, got {labels.dtype}")
    return (labels != IGNORE_INDEX).sum(dtype=torch.int64)


def _check_floats(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    if x.is_meta:
        raise TypeError(f"{name} is on meta, where tensors have no values")


def _check_weight(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(
            f"hidden and weight must be (..., tokens, E) and (vocabulary, E), got shapes {got}"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden and weight must have one dtype, got {hidden.dtype} and {weight.dtype}"
        )
    if hidden.device != weight.device:
        raise ValueError(
            f"hidden and weight must be on one device, got {hidden.device} and {weight.device}"
        )


def _check_labels(labels: Tensor, rows: Tensor, vocabulary: int) -> None:
    """`rows` (..., any) has a row for each label."""
    check_tensor("labels", labels)
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, got {labels.dtype}")
    if labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"labels must be of shape {tuple(rows.shape[:-1])}, one a token, got {tuple(labels.shape)}"
        )
    if labels.device != rows.device:
        raise ValueError(f"labels are on {labels.device}, what they are for is on {rows.device}")
    outside = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocabulary))
    if labels.is_cuda:
        torch._assert_async(~outside.any(), "a label is not in the vocabulary")
    elif outside.any():
        raise ValueError(f"label {int(labels[outside][0])} is not in a vocabulary of {vocabulary}")


def _split_range(count: int, width: int) -> Iterator[slice]:
    return (slice(start, min(start + width, count)) for start in range(0, count, width))


def _tiles(weights: Sequence[Tensor]) -> Iterator[tuple[int, slice, int]]:
    """Tiles of entries: which weight, which of its rows, and where the first of these is among
    those of all weights.
    """
    before = 0
    for part, weight in enumerate(weights):
        for entries in _split_range(len(weight), _TILE_ENTRIES):
            yield part, entries, before + entries.start
        before += len(weight)


@fused_on_gpus
def _logsumexp(logits: Tensor) -> Tensor:
    """Of a tile's rows: (N, V) to (N,), in the accumulator's dtype."""
    return logits.to(accumulator_dtype(logits.dtype)).logsumexp(-1)


@fused_on_gpus
def _logits_gradient(logits: Tensor, lse: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """(softmax - onehot(column)) * factor of a tile (N, V), in its dtype; the rest are (N,),
    columns may be outside.
    """
    probs = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
    onehot = column.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    return probs.sub_(onehot.to(torch.uint8)).mul_(factor.unsqueeze(1)).to(logits.dtype)


def _columns(column: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns (N,) of a tile as (N, 1), those outside anywhere in it; and whether they are inside,
    (N,).
    """
    inside = (column >= 0) & (column < width)
    return column.where(inside, 0).unsqueeze(1), inside
