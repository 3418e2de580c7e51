"""One AdamW update of a tensor (arXiv 1711.05101). `triton_adamw.py` does the same on GPUs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Update(NamedTuple):
    """The numbers of an AdamW update.

    step    counted from 1, for the bias correction
    factor  clips and unscales gradients
    """

    lr: float
    step: int
    factor: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def update(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    numbers: Update,
) -> None:
    """Update flat fp32 tensors of equal size in place, as torch.optim.AdamW does, on a CPU.

    grad    of any dtype and device. Its values may be lost.
    weight  the same size, of any dtype and device: the updated masters are rounded to it
    """
    grad = grad.to(master.device, torch.float32)
    if numbers.factor != 1.0:
        grad.mul_(numbers.factor)
    torch._fused_adamw_(
        [master],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(numbers.step))],
        lr=numbers.lr,
        beta1=numbers.betas[0],
        beta2=numbers.betas[1],
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
    )
    if weight is not None:
        weight.copy_(master)
