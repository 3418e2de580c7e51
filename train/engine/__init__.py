"""Engines: how a model of plain torch modules is sharded over ranks and trained. One engine a file.

torch     FSDP2 over torch.distributed: gloo on CPUs, NCCL on GPUs
bmtrain   BMTrain's ZeRO-3, on GPUs
common    the parts that both share: masters, their initial values, AdamW over them

A model has a method `init_parameter`, and `layers_at` names its list of blocks. fp32 masters and
AdamW's state are flat shards, so a checkpoint depends on neither engine nor ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Entries start, start + 1, ... of a flattened tensor of `shape`, in this rank's memory."""

    flat: Tensor
    start: int
    shape: tuple[int, ...]


def layers_name(model: nn.Module) -> str:
    """Return the name of the model's list of blocks."""
    name: Any = model.layers_at
    assert isinstance(name, str)
    return name


class Engine(ABC):
    """One model in training. Every rank must call the methods that communicate.

    loss_scale      for fp16: gradients are scaled by this until the step, so that small ones do not
                    vanish. It halves when they overflow, and doubles after many steps without
                    overflow. 1 for other dtypes
    steps_at_scale  steps without overflow since the scale changed
    """

    loss_scale: float = 1.0
    steps_at_scale: int = 0
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of the *sum* over ranks of `loss`, which carries the scale."""

    @abstractmethod
    def step(self, lr: float, max_norm: float) -> float:
        """Do one AdamW step with gradients clipped to a global norm of `max_norm`, and clear them.
        Return the norm before. Raises FloatingPointError on every rank if it is not finite. Then
        only gradients change.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Drop the gradients that `backward` accumulated."""

    @abstractmethod
    def state(self) -> dict[str, Shard]:
        """Return this rank's shards, by weight/NAME, exp_avg/NAME and exp_avg_sq/NAME."""

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """Steps so far, as Adam's bias correction counts them."""

    @abstractmethod
    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        """Fill every shard of `state` with the tensor that `read(key, shard)` returns."""

    @abstractmethod
    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in fp64."""
