"""Cross entropy over a shard of a sequence, with or without the projection to the vocabulary.

The mean over a shard is not a share of the mean over the sequence: shards differ in valid targets,
and one may have none. So the loss of a shard is a sum and a count. The caller divides by the count
over the global batch.

Letters: N tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .base.arguments import DTYPES, check_tensor
from .base.autocast import autocast
from .base.autograd import check_first_derivative
from .base.compiled import fused_on_gpus, not_compiled
from .base.dtypes import accumulator_dtype
from .sequence.layout import IGNORE_INDEX, SIGNED

# Logits exist in tiles of at most these sizes: 128 MiB in bf16. CPUs also keep an fp32 copy,
# GPUs keep that in registers. The gradient of the hidden states is summed over entries, the
# gradient of the weights over tokens. So few tiles of tokens are best.
_TILE_TOKENS = 1 << 15
_WIDENED_TOKENS = 1 << 10  # rows of logits that are widened at a time
_TILE_ENTRIES = 1 << 11


@not_compiled
def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy_sum` of the logits hidden @ weight^T, without ever holding them all.

    hidden: (..., S, E). weight: (V, E), or several, which are concatenated. labels: (..., S) int64.
    All are on one device. hidden and weight have one dtype: fp16, bf16, fp32 or fp64. Under
    autocast they are cast as F.linear casts, and gradients have their original dtype. Logits are
    rounded to that dtype, as a linear layer's, and widened to fp32 (fp64).

    The backward computes the logits again, tile by tile. With P = softmax(logits), dlogits = dloss
    (P - onehot(label)), and 0 for tokens without a target. Differentiable once in hidden and
    weight: the backward raises RuntimeError with create_graph.

    Raises TypeError for wrong dtypes and for tensors without values. Raises ValueError for shapes
    or devices that do not fit each other, and for a label outside the vocabulary. On GPUs the host
    does not wait, and such a label is a device-side assertion.
    """
    return _token_losses(hidden, weight, labels).sum(), count_targets(labels)


@not_compiled
def linear_cross_entropy_by_row(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the sums of linear_cross_entropy_sum for each row of `labels`: (...) losses in fp32
    (fp64), and numbers of targets in int64.

    Arguments, errors and costs are those of linear_cross_entropy_sum. So are the gradients if all
    rows have the same gradient.
    """
    losses = _token_losses(hidden, weight, labels).view(labels.shape).sum(-1)
    return losses, (labels != IGNORE_INDEX).sum(-1)


def _token_losses(hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor) -> Tensor:
    """Return the loss of each token, 0 without a target: (N,)."""
    hidden, weights = _check_inputs(hidden, weight, labels)
    losses: Tensor = _LinearCrossEntropy.apply(hidden.flatten(0, -2), labels.flatten(), *weights)
    return losses


@not_compiled
@torch.no_grad()
def score_tokens(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each token's loss, and the most likely token in its place, without ever holding all
    logits, and without gradient.

    Arguments and errors are those of linear_cross_entropy_sum. Both results are (..., S): losses in
    fp32 (fp64), 0 where there is no target, and tokens in int64. Of equally likely tokens, the
    first one is returned, as by argmax. It is -1 if logits are NaN.
    """
    hidden, weights = _check_inputs(hidden, weight, labels)
    with torch.autocast(hidden.device.type, enabled=False):
        best = torch.full(labels.shape, -1, device=labels.device)
        lse, target = compare_logits(
            hidden.flatten(0, -2), weights, labels.flatten(), best.view(-1)
        )
    losses = (lse - target).view(labels.shape)
    return losses.where(labels != IGNORE_INDEX, 0.0), best


def _check_inputs(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Check the inputs of a loss. Return hidden and weights as autocast casts them."""
    weights: list[Any] = list(weight) if isinstance(weight, list | tuple) else [weight]
    _check_floats("hidden", hidden)
    for part in weights:
        _check_floats("weight", part)
    hidden, *weights = map(autocast, (hidden, *weights))
    for part in weights:
        _check_weight(hidden, part)
    _check_labels(labels, hidden, sum(map(len, weights)))
    return hidden, weights


def compare_logits(
    hidden: Tensor, weights: Sequence[Tensor], labels: Tensor, best: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the lse of each token's logits, and the logit of its label: (N,). Fill `best` (N,)
    with the token of the largest logit.
    """
    wide = accumulator_dtype(hidden.dtype)
    lse = torch.full(labels.shape, -torch.inf, dtype=wide, device=hidden.device)
    target, highest = torch.zeros_like(lse), lse.clone()
    for rows in _split_range(len(labels), _TILE_TOKENS):
        for part, entries, first in _tiles(weights):
            logits = hidden[rows] @ weights[part][entries].T
            lse[rows] = torch.logaddexp(lse[rows], _logsumexp(logits))
            column = labels[rows] - first
            inside = (column >= 0) & (column < logits.shape[1])
            found = logits.gather(1, column.where(inside, 0).unsqueeze(1)).squeeze(1)
            target[rows] += found.where(inside, 0.0)
            if best is not None:
                value, place = logits.max(1)
                higher = value > highest[rows]
                best[rows] = torch.where(higher, place + first, best[rows])
                highest[rows] = torch.where(higher, value.to(wide), highest[rows])
    return lse, target


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, *weights: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            lse, target = compare_logits(hidden, weights, labels)
            ctx.save_for_backward(hidden, labels, lse, *weights)
            return (lse - target).where(labels != IGNORE_INDEX, 0.0)

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("linear_cross_entropy_sum")
        hidden, labels, lse, *weights = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            factor = dlosses.to(lse.dtype) * (labels != IGNORE_INDEX)
            wanted, _, *of_weights = ctx.needs_input_grad
            dhidden, dweights = differentiate_logits(
                hidden, weights, labels, lse, factor, (wanted, *of_weights)
            )
        return dhidden, None, *dweights


def differentiate_logits(
    hidden: Tensor,
    weights: Sequence[Tensor],
    labels: Tensor,
    lse: Tensor,
    factor: Tensor,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return dhidden (N, E) and dweights, each if it is wanted. `factor` (N,) is the gradient of
    each token's loss.
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


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of token losses and the number of valid targets.

    logits: (..., S, V), fp16, bf16, fp32 or fp64, widened to fp32 (fp64). labels: (..., S) int64,
    IGNORE_INDEX (-100) where there is no target. label_smoothing, 0 to 1, is the part of each
    target that is spread over the vocabulary, as in torch's cross_entropy. Both results are
    scalars, fp32 (fp64) and int64. Without targets they are 0 and 0, with zero gradients. Raises
    the errors of linear_cross_entropy_sum.

    Logits are widened for a tile of tokens at a time, and again in the backward.
    """
    _check_floats("logits", logits)
    if logits.dim() < 2:
        raise ValueError(
            f"logits: expected (..., tokens, vocabulary), got shape {tuple(logits.shape)}"
        )
    _check_labels(labels, logits, logits.shape[-1])
    total = torch.zeros((), dtype=accumulator_dtype(logits.dtype), device=logits.device)
    tiles = (x.split(_WIDENED_TOKENS) for x in (logits.flatten(0, -2), labels.flatten()))
    for of_logits, of_labels in zip(*tiles, strict=True):
        arguments = of_logits, of_labels, label_smoothing
        loss = checkpoint(_sum_tile, *arguments, use_reentrant=False, preserve_rng_state=False)
        total = total + loss
    return total, count_targets(labels)


def _sum_tile(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(
        logits.to(accumulator_dtype(logits.dtype)),
        labels,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def count_targets(labels: Tensor) -> Tensor:
    """Return the number of valid targets, an int64 scalar. Raises TypeError for labels of a dtype
    without negative numbers.
    """
    check_tensor("labels", labels)
    if labels.dtype not in SIGNED:
        raise TypeError(f"labels: expected a signed integer dtype, got {labels.dtype}")
    return (labels != IGNORE_INDEX).sum(dtype=torch.int64)


def _check_floats(name: str, x: Tensor) -> None:
    check_tensor(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected fp16, bf16, fp32 or fp64, got {x.dtype}")
    if x.is_meta:
        raise TypeError(f"{name}: expected a tensor with values, got one on meta")


def _check_weight(hidden: Tensor, weight: Tensor) -> None:
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(
            f"hidden and weight: expected (..., tokens, E) and (vocabulary, E), got shapes {got}"
        )
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"hidden and weight: expected one dtype, got {hidden.dtype} and {weight.dtype}"
        )
    if hidden.device != weight.device:
        raise ValueError(
            f"hidden and weight: expected one device, got {hidden.device} and {weight.device}"
        )


def _check_labels(labels: Tensor, rows: Tensor, vocabulary: int) -> None:
    """Raise an error for labels that do not fit `rows` (..., any), which has a row for each."""
    check_tensor("labels", labels)
    if labels.dtype != torch.int64:
        raise TypeError(f"labels: expected int64, got {labels.dtype}")
    if labels.shape != rows.shape[:-1]:
        raise ValueError(
            f"labels: expected shape {tuple(rows.shape[:-1])}, one a token, got "
            f"{tuple(labels.shape)}"
        )
    if labels.device != rows.device:
        raise ValueError(f"labels: expected them on {rows.device}, got them on {labels.device}")
    outside = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= vocabulary))
    if labels.is_cuda:
        torch._assert_async(~outside.any(), "a label is not in the vocabulary")
    elif outside.any():
        raise ValueError(f"label {int(labels[outside][0])} is not in a vocabulary of {vocabulary}")


def _split_range(count: int, width: int) -> Iterator[slice]:
    return (slice(start, min(start + width, count)) for start in range(0, count, width))


def _tiles(weights: Sequence[Tensor]) -> Iterator[tuple[int, slice, int]]:
    """Yield tiles of entries: the index of a weight, rows of it, and the number of the first of
    them among the rows of all weights.
    """
    before = 0
    for part, weight in enumerate(weights):
        for entries in _split_range(len(weight), _TILE_ENTRIES):
            yield part, entries, before + entries.start
        before += len(weight)


@fused_on_gpus
def _logsumexp(logits: Tensor) -> Tensor:
    """Reduce a tile's rows (N, V) to (N,), in the accumulator's dtype."""
    return logits.to(accumulator_dtype(logits.dtype)).logsumexp(-1)


@fused_on_gpus
def _logits_gradient(logits: Tensor, lse: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """Return (softmax - onehot(column)) * factor of a tile (N, V), in its dtype. The other
    arguments are (N,). Columns may be outside the tile.
    """
    probs = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp_()
    onehot = column.unsqueeze(1) == torch.arange(logits.shape[1], device=logits.device)
    return probs.sub_(onehot.to(torch.uint8)).mul_(factor.unsqueeze(1)).to(logits.dtype)
