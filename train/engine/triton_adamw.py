"""AdamW of one tensor in one Triton kernel, which reads and writes each number once.

It computes what torch.optim.AdamW does, in the same order and in fp32. Torch's own kernel needs
other passes before it, for a copy of gradients in fp32 and for the clipping, and one after it, for
weights in 16 bits.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from .adamw import Update

_BLOCK = 1024  # entries of a program


def update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    numbers: Update,
) -> None:
    """Do the same as `adamw.update`, on one GPU. Gradients keep their values."""
    (beta1, beta2), lr, step = numbers.betas, numbers.lr, numbers.step
    size = master.numel()
    # Triton does not compile again for other floats
    _update[(triton.cdiv(size, _BLOCK),)](
        master,
        exp_avg,
        exp_avg_sq,
        grad,
        weight,
        size,
        numbers.factor,
        lr * numbers.weight_decay,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
        numbers.eps,
        _BLOCK,
    )


@triton.jit
def _update(
    master, exp_avg, exp_avg_sq, grad, weight, size,
    factor, decay, beta1, rest1, beta2, rest2, step_size, correction, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(grad + at, inside, 0).to(tl.float32) * factor
    x = tl.load(master + at, inside, 0)
    x -= decay * x
    m = beta1 * tl.load(exp_avg + at, inside, 0) + rest1 * g
    v = beta2 * tl.load(exp_avg_sq + at, inside, 0) + rest2 * g * g
    x -= step_size * m / (tl.sqrt_rn(v) / correction + eps)
    tl.store(master + at, x, inside)
    tl.store(exp_avg + at, m, inside)
    tl.store(exp_avg_sq + at, v, inside)
    if weight is not None:
        tl.store(weight + at, x.to(weight.dtype.element_ty), inside)
