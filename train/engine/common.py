"""The common part of the engines: fp32 masters of a rank's shards, and AdamW over them."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import Update, update


@dataclass(frozen=True)
class Shard:
    """Entries start, start + 1, ... of a flattened tensor of `shape`, in this rank's memory."""

    flat: Tensor
    start: int
    shape: tuple[int, ...]


def layers_name(model: nn.Module) -> str:
    name: Any = model.layers_at
    assert isinstance(name, str)
    return name


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW (arXiv 1711.05101). Norm weights and biases do not decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


_CHUNK = 1 << 18  # entries that a CPU squares and sums at once


def square_sum(tensors: Iterable[Tensor]) -> float:
    """Return the sum of squares of all entries in fp64, for tensors of any dtype on one device.

    GPUs square and sum in fp64 while they read. CPUs first make a copy in fp64, and add one entry
    after another. Chunks keep the copies small and the sum exact to 1e-12.
    """
    parts = [
        part
        for x in tensors
        for part in (x.reshape(-1).split(_CHUNK) if x.is_cpu else [x])
        if part.numel()
    ]
    if not parts:
        return 0.0
    return float(torch.stack(torch._foreach_norm(parts, dtype=torch.float64)).square().sum())


class ShardedAdamW:
    """AdamW over named shards, which may be empty. Without settings it has no state and no step."""

    def __init__(self, shards: Mapping[str, Shard], settings: AdamW | None):
        self.shards, self.settings, self.steps = dict(shards), settings, 0
        self._update: Callable[..., None] = update
        masters = {name: shard.flat for name, shard in self.shards.items()}
        self._full = [name for name, flat in masters.items() if flat.numel()]
        self._state = {"weight": masters}
        if settings is None:
            return
        for kind in ("exp_avg", "exp_avg_sq"):
            self._state[kind] = {name: torch.zeros_like(x) for name, x in masters.items()}
        if any(x.is_cuda for x in masters.values()):
            from . import triton_adamw

            self._update = triton_adamw.update

    def step(
        self,
        grads: Mapping[str, Tensor],
        lr: float,
        max_norm: float,
        sum_over_ranks: Callable[[list[float]], list[float]],
        loss_scale: float = 1.0,
        weights: Mapping[str, Tensor] | None = None,
    ) -> float:
        """Do one step with a rank's gradients, scaled by `loss_scale`. Return the unscaled norm.
        Raises FloatingPointError on every rank if it is not finite. Then nothing has changed.

        weights  tensors of the shards' sizes, to which the masters are rounded
        """
        assert self.settings is not None, "without settings there is no step"
        [square] = sum_over_ranks([square_sum(grads[name] for name in self._full)])
        norm = math.sqrt(square) / loss_scale
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        factor = min(1.0, max_norm / norm if norm else 1.0) / loss_scale
        self.steps += 1
        for name in self._full:
            decay = self.settings.weight_decay if len(self.shards[name].shape) > 1 else 0.0
            numbers = Update(lr, self.steps, factor, self.settings.betas, self.settings.eps, decay)
            state = (tensors[name] for tensors in self._state.values())
            weight = weights[name] if weights else None
            self._update(*state, grads[name].reshape(-1), weight, numbers)
        return norm

    def state(self) -> dict[str, Shard]:
        return {
            f"{kind}/{name}": Shard(tensors[name], shard.start, shard.shape)
            for kind, tensors in self._state.items()
            for name, shard in self.shards.items()
        }

    def load(self, read: Callable[[str, Shard], Tensor], steps: int) -> None:
        for key, shard in self.state().items():
            shard.flat.copy_(read(key, shard))
        self.steps = steps


class Engine(ABC):
    """One model in training, by fp32 masters of this rank's shards. A subclass shards the model.

    loss_scale      for fp16: gradients are scaled by this until the step, so that small ones do not
                    vanish. It halves when they overflow, and doubles after many steps without
                    overflow. 1 for other dtypes
    steps_at_scale  steps without overflow since the scale changed

    Every rank must call the methods that communicate.
    """

    loss_scale: float = 1.0
    steps_at_scale: int = 0
    device: torch.device
    model: nn.Module
    _optimizer: ShardedAdamW

    @abstractmethod
    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        """Accumulate gradients of the *sum* over ranks of `loss`, which carries the scale.

        is_last  whether it is the last one before `step` or `clear_gradients`
        """

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
    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in fp64."""

    def state(self) -> dict[str, Shard]:
        """Return this rank's shards, by weight/NAME, exp_avg/NAME and exp_avg_sq/NAME."""
        return self._optimizer.state()

    @property
    def optimizer_steps(self) -> int:
        """Steps so far, as Adam's bias correction counts them."""
        return self._optimizer.steps

    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        """Fill every shard of `state` with the tensor that `read(key, shard)` returns."""
        self._optimizer.load(read, optimizer_steps)

    def _start_masters(self, seed: int) -> None:
        """Fill the masters with their parts of parameters, which are the same on all ranks."""
        fill: Any = self.model.init_parameter
        for name, shard in self._optimizer.shards.items():
            whole = torch.empty(shard.shape, device=self.device)
            fill(name, whole, seeded_generator(f"{seed}/{name}", self.device))
            shard.flat.copy_(whole.flatten()[shard.start : shard.start + shard.flat.numel()])


def seeded_generator(text: str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator with a hash of `text` as its seed."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
