"""Engines: how a model of plain torch modules is spread over ranks and trained. One engine a file.

torch     FSDP2 over torch.distributed: gloo on CPU, NCCL on GPU
bmtrain   ZeRO-3 of BMTrain, on GPUs
common    what both build on: masters, their start, AdamW over them

A model is written once, as torch modules with an `init_parameter` method and a module list of
blocks, of which `layers_at` says the name in the model. An engine shards it, keeps fp32 master
weights and AdamW state, and exposes both as flat shards, so that a checkpoint does not depend on
the engine or on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Entries start, start + 1, ... of a flattened tensor of `shape`; `flat` is a view of this
    rank's memory.
    """

    flat: Tensor
    start: int
    shape: tuple[int, ...]


class Engine(ABC):
    """One model under training. All methods that communicate must be called by every rank.

    loss_scale      of fp16 training: gradients are those of the loss times this until the step, so
                    that small ones do not vanish; it halves when they overflow and doubles after
                    many steps without. 1 in other dtypes.
    steps_at_scale  steps without overflow since it changed
    """

    loss_scale: float = 1.0
    steps_at_scale: int = 0
    rank: int
    world_size: int
    device: torch.device
    model: nn.Module

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulates gradients of the *sum* over ranks of `loss`: divide by global counts, never
        by ranks.
        """

    @abstractmethod
    def step(self, lr: float, max_norm: float) -> float:
        """One AdamW step with gradients clipped to a global norm of `max_norm`; clears them.

        Returns the norm over all parameters of all ranks before clipping. Raises FloatingPointError
        on every rank if that is not finite; then nothing else changed but that gradients are
        cleared.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forgets what `backward` accumulated."""

    @abstractmethod
    def state(self) -> dict[str, Shard]:
        """This rank's shards of weights and optimizer state: "weight/NAME", "exp_avg/NAME",
        "exp_avg_sq/NAME".
        """

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """Steps taken, as Adam's bias correction counts them."""

    @abstractmethod
    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        """Fills every shard of `state` with what `read(key, shard)` returns for it."""

    @abstractmethod
    def sum(self, values: list[float]) -> list[float]:
        """Sums each value over all ranks, in fp64."""
