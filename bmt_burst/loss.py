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

from .base.arguments import DTYPES, as_positive, check_tensor
from .base.autocast import autocast
from .base.autograd import check_first_derivative
from .base.compiled import not_compiled
from .base.dtypes import accumulator_dtype
from .base.policies import without_policies
from .fused import find_passes
from .sequence.layout import IGNORE_INDEX, SIGNED

_WIDENED_TOKENS = 1 << 10  # rows of logits that are widened at a time
# The gradient of a weight is read and written once for each tile of tokens, and wide products are
# faster. So tiles are large.
_TILE_BYTES = 512 << 20
_LEAST_TOKENS, _TOKENS_MULTIPLE, _COLUMNS_MULTIPLE = 1 << 10, 1 << 8, 1 << 6


@not_compiled
def linear_cross_entropy_sum(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `cross_entropy_sum` of the logits hidden @ weight^T, without ever holding them all.

    hidden: (..., S, E). weight: (V, E), or several, which are concatenated. labels: (..., S) int64.
    hidden and weight have one dtype, fp16, bf16, fp32 or fp64, and are cast as F.linear casts under
    autocast. Logits are rounded to that dtype, as a linear layer's, and widened to fp32 (fp64).

    If a gradient is wanted, the forward computes it tile by tile: dlogits = softmax(logits) -
    onehot(label), or 0 without a target. Until the backward multiplies it by the gradient of the
    sum, the gradient of hidden is kept in its dtype, and the gradient of a weight in fp32 (fp64).
    Differentiable once in hidden and weight: the backward raises RuntimeError with create_graph.

    Raises TypeError for wrong dtypes and for tensors without values. Raises ValueError for shapes
    or devices that do not fit, and for a label outside the vocabulary. On GPUs the host does not
    wait, and such a label is a device-side assertion.
    """
    total, count, _ = linear_cross_entropy_by_row(hidden, weight, labels)
    return total, count


@not_compiled
def linear_cross_entropy_by_row(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute linear_cross_entropy_sum, with its arguments and errors. Also return the sum of each
    row of `labels`: (...) in fp32 (fp64), without a gradient.
    """
    hidden, weights = _check_inputs(hidden, weight, labels)
    flat = hidden.flatten(0, -2), labels.flatten()
    total, losses = _LinearCrossEntropy.apply(*flat, torch.is_grad_enabled(), *weights)
    return total, count_targets(labels), losses.view(labels.shape).sum(-1)


@not_compiled
@torch.no_grad()
def score_tokens(
    hidden: Tensor, weight: Tensor | Sequence[Tensor], labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute each token's loss, and the most likely token in its place, without gradient.

    Arguments and errors are those of linear_cross_entropy_sum. Both results are (..., S): losses in
    fp32 (fp64), 0 where there is no target, and tokens in int64, the first of equally likely ones.
    A token is -1 if logits are NaN.
    """
    hidden, weights = _check_inputs(hidden, weight, labels)
    losses = hidden.new_empty(labels.shape, dtype=accumulator_dtype(hidden.dtype))
    best = labels.new_empty(labels.shape)
    flat, entries = labels.flatten(), sum(map(len, weights))
    compute = find_passes(hidden).compute_losses
    with torch.autocast(hidden.device.type, enabled=False):
        for rows, logits, _ in _tiles(hidden.flatten(0, -2), weights):
            highest, place = logits[:, :entries].max(1)
            best.view(-1)[rows] = place.where(~highest.isnan(), -1)
            losses.view(-1)[rows] = compute(logits, entries, flat[rows], False)
    return losses, best


@not_compiled
def token_logprobs(
    hidden: Tensor,
    weight: Tensor | Sequence[Tensor],
    targets: Tensor,
    temperature: float = 1.0,
    entropies: bool = False,
) -> Tensor | Any:
    """Compute the log-probability of each target, without ever holding all logits.

    targets      labels of linear_cross_entropy_sum, such as this rank's of shift_labels
    temperature  what logits are divided by
    entropies    also return the entropy of each token's distribution

    Results are (..., S) in fp32 (fp64), in nats, 0 where there is no target. The backward computes
    the logits again. Differentiable once in hidden and weight. A rank's gradient of the weight is
    the share of its tokens.

    Arguments and errors are those of linear_cross_entropy_sum. Raises ValueError for a temperature
    that is not positive and finite.
    """
    hidden, weights = _check_inputs(hidden, weight, targets)
    scale = 1 / as_positive("temperature", temperature)
    flat = hidden.flatten(0, -2), targets.flatten()
    logprobs, of_all = _TokenLogprobs.apply(*flat, scale, *weights)
    logprobs, of_all = (x.view(targets.shape) for x in (logprobs, of_all))
    return (logprobs, of_all) if entropies else logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, scale: float, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = accumulator_dtype(hidden.dtype)
        with without_policies(), torch.autocast(hidden.device.type, enabled=False):
            found, entropies, lse = (hidden.new_zeros(len(targets), dtype=wide) for _ in range(3))
            for rows, logits in _scaled_tiles(hidden, weights, scale):
                has = targets[rows] != IGNORE_INDEX
                lse[rows] = logits.logsumexp(1)
                log_probs = logits.sub_(lse[rows].unsqueeze(1))
                at = targets[rows].clamp_min(0).unsqueeze(1)
                found[rows] = log_probs.gather(1, at).squeeze(1).where(has, 0)
                entropies[rows] = torch.special.entr(log_probs.exp_()).sum(1).where(has, 0)
        ctx.save_for_backward(hidden, targets, lse, entropies, *weights)
        ctx.scale = scale
        return found, entropies

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("token_logprobs")
        hidden, targets, lse, entropies, *weights = ctx.saved_tensors
        wanted, _, _, *of_weights = ctx.needs_input_grad
        dhidden, dweights = _make_gradients(hidden, weights, wanted, of_weights)
        has = targets != IGNORE_INDEX
        of_target, of_entropy = (x.where(has, 0).unsqueeze(1) for x in grads)
        with without_policies(), torch.autocast(hidden.device.type, enabled=False):
            for rows, logits in _scaled_tiles(hidden, weights, ctx.scale):
                # d log p_t = onehot - p, d H = -p (log p + H)
                log_probs = logits.sub_(lse[rows].unsqueeze(1))
                shares = log_probs.add(entropies[rows].unsqueeze(1)).mul_(of_entropy[rows])
                dlogits = shares.add_(of_target[rows]).mul_(log_probs.exp_()).neg_()
                dlogits.scatter_add_(1, targets[rows].clamp_min(0).unsqueeze(1), of_target[rows])
                dlogits = dlogits.mul_(ctx.scale).to(hidden.dtype)
                parts = dlogits.split(list(map(len, weights)), 1)
                _add_gradients(rows, parts, hidden, weights, dhidden, dweights)
        of_all = (x if x is None else x.to(hidden.dtype) for x in dweights)
        return dhidden, None, None, *of_all


def _scaled_tiles(
    hidden: Tensor, weights: Sequence[Tensor], scale: float
) -> Iterator[tuple[slice, Tensor]]:
    """Yield tiles of tokens with their logits times `scale`, which may be changed: (tile, V) in the
    dtype of sums.
    """
    entries, wide = sum(map(len, weights)), accumulator_dtype(hidden.dtype)
    for rows, logits, _ in _tiles(hidden, weights):
        for start in range(0, len(logits), _WIDENED_TOKENS):
            part = slice(start, min(start + _WIDENED_TOKENS, len(logits)))
            at = slice(rows.start + part.start, rows.start + part.stop)
            yield at, logits[part, :entries].to(wide) * scale


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


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, labels: Tensor, differentiate: bool, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        wanted, _, _, *of_weights = (differentiate and x for x in ctx.needs_input_grad)
        entries, is_wanted = sum(map(len, weights)), wanted or any(of_weights)
        compute = find_passes(hidden).compute_losses
        with without_policies(), torch.autocast(hidden.device.type, enabled=False):
            losses = hidden.new_empty(len(labels), dtype=accumulator_dtype(hidden.dtype))
            dhidden, dweights = _make_gradients(hidden, weights, wanted, of_weights)
            for rows, logits, parts in _tiles(hidden, weights):
                losses[rows] = compute(logits, entries, labels[rows], is_wanted)
                _add_gradients(rows, parts, hidden, weights, dhidden, dweights)
        ctx.save_for_backward(dhidden, *dweights)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @not_compiled  # nor by compiled autograd
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_derivative("linear_cross_entropy_sum")
        dhidden, *dweights = (
            None if x is None else _scale(x, grads[0], ctx.dtype) for x in ctx.saved_tensors
        )
        return dhidden, None, None, *dweights


def _make_gradients(
    hidden: Tensor, weights: Sequence[Tensor], wanted: bool, of_weights: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return memory for the gradients that are wanted: that of hidden, and zeros in fp32 (fp64) for
    each weight.
    """
    wide = accumulator_dtype(hidden.dtype)
    pairs = zip(weights, of_weights, strict=True)
    dweights = [torch.zeros_like(x, dtype=wide) if needs else None for x, needs in pairs]
    return hidden.new_empty(hidden.shape) if wanted else None, dweights


def _add_gradients(
    rows: slice,
    parts: Sequence[Tensor],
    hidden: Tensor,
    weights: Sequence[Tensor],
    dhidden: Tensor | None,
    dweights: Sequence[Tensor | None],
) -> None:
    """Set the gradients of a tile's rows of hidden, and add its shares to those of the weights.
    `parts` are the gradients of its logits, by weight.
    """
    for i, (dlogits, weight, dweight) in enumerate(zip(parts, weights, dweights, strict=True)):
        if dhidden is not None:
            dhidden[rows].addmm_(dlogits, weight, beta=int(i > 0))
        if dweight is not None:
            _add_product(dweight, dlogits.T, hidden[rows])


def _tiles(
    hidden: Tensor, weights: Sequence[Tensor]
) -> Iterator[tuple[slice, Tensor, Sequence[Tensor]]]:
    """Yield tiles of tokens, their logits (tile, V) in the same memory, and the part of each
    weight. On GPUs logits have more columns, which mean nothing.
    """
    entries = sum(map(len, weights))
    tokens = tile_tokens(len(hidden), entries, hidden.dtype)
    # On GPUs rows begin at aligned addresses. On CPUs products in bf16 may read a gap between rows.
    width = _round_up(entries, _COLUMNS_MULTIPLE) if hidden.is_cuda else entries
    memory = hidden.new_empty(min(tokens, len(hidden)), width)
    for start in range(0, len(hidden), tokens):
        rows = slice(start, min(start + tokens, len(hidden)))
        logits = memory[: rows.stop - rows.start]
        parts = logits[:, :entries].split(list(map(len, weights)), 1)
        for weight, part in zip(weights, parts, strict=True):
            torch.mm(hidden[rows], weight.T, out=part)
        yield rows, logits, parts


def tile_tokens(tokens: int, entries: int, dtype: torch.dtype) -> int:
    """Return how many tokens linear_cross_entropy_sum takes at a time, with V `entries`."""
    most = _TILE_BYTES // (max(entries, 1) * dtype.itemsize)
    most = max(most - most % _TOKENS_MULTIPLE, _LEAST_TOKENS)
    tiles = -(-tokens // most)
    return _round_up(-(-tokens // max(tiles, 1)), _TOKENS_MULTIPLE) or _TOKENS_MULTIPLE


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total` in its own dtype: a sum over tokens would overflow fp16."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scale(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (any, any) times a scalar, rounded once to `dtype`."""
    # as a matrix: torch would round a scalar to the dtype of x before it multiplies
    return torch.mul(x, factor.view(1, 1), out=x.new_empty(x.shape, dtype=dtype))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of token losses and the number of valid targets.

    logits: (..., S, V), fp16, bf16, fp32 or fp64, widened to fp32 (fp64) for a tile of tokens at a
    time, and again in the backward. labels: (..., S) int64, IGNORE_INDEX (-100) where there is no
    target. label_smoothing, 0 to 1, is the part of each target that is spread over the vocabulary,
    as in torch's cross_entropy. Both results are scalars, fp32 (fp64) and int64. Without targets
    they are 0 and 0, with zero gradients. Raises the errors of linear_cross_entropy_sum.
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
    """Return the number of valid targets, int64. Raises TypeError for labels of unsigned dtypes."""
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
    expected = "hidden and weight: expected"
    if hidden.dim() < 2 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        got = f"{tuple(hidden.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"{expected} (..., tokens, E) and (vocabulary, E), got shapes {got}")
    if hidden.dtype != weight.dtype:
        raise TypeError(f"{expected} one dtype, got {hidden.dtype} and {weight.dtype}")
    if hidden.device != weight.device:
        raise ValueError(f"{expected} one device, got {hidden.device} and {weight.device}")


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
