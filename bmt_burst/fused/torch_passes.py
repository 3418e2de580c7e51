"""The specification of the passes, in plain torch.

Results are computed in the accumulator's dtype, fp32 or fp64, and rounded once.

Letters: B batch, S tokens, H heads, D head size, E width of a norm, N tokens with logits, W width
of a row of logits in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.dtypes import accumulator_dtype
from ..sequence.layout import IGNORE_INDEX


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Rotate the pairs (x_j, x_{j + D/2}) of x (..., S, H, D). cos and sin are (S, D/2) or
    (..., S, D/2), where 1 in place of a size repeats them. The gradient is rotated `back`.
    """
    cos, sin = cos.unsqueeze(-2), (-sin if back else sin).unsqueeze(-2)
    left, right = x.to(accumulator_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def gate(gate: Tensor, up: Tensor, silu: bool = True) -> Tensor:
    """Return silu(gate) * up, or sigmoid(gate) * up without `silu`."""
    wide = accumulator_dtype(gate.dtype)
    x = gate.to(wide)
    factor = torch.nn.functional.silu(x) if silu else x.sigmoid()
    return (factor * up.to(wide)).to(gate.dtype)


def gate_gradients(
    gate: Tensor, up: Tensor, dout: Tensor, again: bool, silu: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of gate and up, and `again` the result, maybe in `dout`'s memory."""
    wide = accumulator_dtype(gate.dtype)
    x, y, dz = gate.to(wide), up.to(wide), dout.to(wide)
    share = x.sigmoid()
    factor = x * share if silu else share
    slope = share * (1 + x * (1 - share)) if silu else share * (1 - share)
    dgate, dup = (dz * y * slope).to(gate.dtype), (dz * factor).to(gate.dtype)
    return dgate, dup, (factor * y).to(gate.dtype) if again else None


def normalize(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x * r * weight and r = 1 / sqrt(mean(x^2) + eps), for x (..., E): r is (...)."""
    wide = x.to(accumulator_dtype(x.dtype))
    r = (wide.square().mean(-1) + eps).rsqrt()
    return (wide * r.unsqueeze(-1) * weight.to(wide.dtype)).to(x.dtype), r


def norm_gradients(
    dout: Tensor, x: Tensor, weight: Tensor, r: Tensor, dx: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of weight. The first one is added to `dx`, if given, and is
    rounded after that. `r` is that of `normalize`.
    """
    wide = accumulator_dtype(x.dtype)
    scale, dy = r.unsqueeze(-1), dout.to(wide)
    normed, dnormed = x.to(wide) * scale, dy * weight.to(wide)
    total = scale * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    if dx is not None:
        total = total + dx.to(wide)
    dweight = (dy * normed).flatten(0, -2).sum(0)
    return total.to(x.dtype), dweight.to(weight.dtype)


def compute_losses(logits: Tensor, columns: int, labels: Tensor, differentiate: bool) -> Tensor:
    """Return the cross entropy of each token: (N,) in fp32 (fp64), 0 without a target.

    logits         (N, W), contiguous. The first `columns` are logits, the others mean nothing
    labels         (N,) int64, IGNORE_INDEX where there is no target
    differentiate  whether to replace the logits by softmax - onehot(label), or by 0 without a
                   target. Then the other columns are undefined

    With NaN or inf among the logits of a token, or nothing but -inf, its loss is not finite.
    """
    logits = logits[:, :columns]
    wide = logits.to(accumulator_dtype(logits.dtype))
    lse, has_target = wide.logsumexp(-1), labels != IGNORE_INDEX
    column = labels.where(has_target, 0).unsqueeze(1)
    target = wide.gather(1, column)
    if differentiate:
        probs = (wide - lse.unsqueeze(1)).exp_()
        probs.scatter_(1, column, probs.gather(1, column) - 1)
        logits.copy_(probs.masked_fill_(~has_target.unsqueeze(1), 0.0))
    return (lse - target.squeeze(1)).where(has_target, 0.0)
