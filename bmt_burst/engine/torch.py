"""The torch engine: plain modules under FSDP2, AdamW on the local shards."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from . import AdamW, Engine, Shard


class TorchEngine(Engine):
    """Shards `build()` over all ranks of torch.distributed, block by block.

    build   makes the model; called on the meta device
    dtype   of weights and activations in forward and backward; masters, gradients and AdamW are fp32
    seed    of the starting weights, which do not depend on the number of ranks
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        adamw: AdamW | None = None,
    ):
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        with torch.device("meta"):
            self.model = build()
        self._shard_model(dtype)
        # Names and what the optimizer works on: each parameter's local rows, sharing memory with the sharded model.
        self._sharded = dict(self.model.named_parameters())
        self._local = {name: nn.Parameter(p.to_local()) for name, p in self._sharded.items()}
        self._init_weights(seed)
        self._init_optimizer(adamw or AdamW())

    def _shard_model(self, dtype: torch.dtype) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        # Inputs keep their dtype: RoPE tables are fp32 in every precision.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in [*self.model.layers, self.model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)  # gradients are sums over ranks; the loss carries the scale
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        self.model.to_empty(device=self.device)

    def _init_weights(self, seed: int) -> None:
        generator = torch.Generator(self.device)
        for name, shard in self._shards().items():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            whole = torch.empty(shard.shape, device=self.device)
            self.model.init_parameter(name, whole, generator)
            shard.flat.copy_(whole.flatten()[shard.start : shard.start + shard.flat.numel()])

    def _init_optimizer(self, adamw: AdamW) -> None:
        trained = {name: p for name, p in self._local.items() if p.numel()}
        decay = [p for p in trained.values() if p.dim() > 1]
        no_decay = [p for p in trained.values() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": adamw.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], betas=adamw.betas, eps=adamw.eps, fused=True
        )
        for p in trained.values():
            state = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self._adamw.state[p] = {"step": torch.zeros((), device=self.device), **state}
        self._steps = 0

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, lr: float, max_norm: float) -> float:
        grads = []
        for name, p in self._local.items():
            p.grad = self._sharded[name].grad.to_local()
            grads.append(p.grad)
        [square] = self.sum([float(torch.stack(torch._foreach_norm(grads)).double().square().sum())])
        norm = math.sqrt(square)
        if not math.isfinite(norm):
            self.clear_gradients()
            raise FloatingPointError(f"the gradient norm is {norm}")
        if norm > max_norm:
            torch._foreach_mul_(grads, max_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.clear_gradients()
        self._steps += 1
        return norm

    def clear_gradients(self) -> None:
        self._adamw.zero_grad()
        self.model.zero_grad()

    def state(self) -> dict[str, Shard]:
        shards = self._shards()
        state = {f"weight/{name}": shard for name, shard in shards.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, shard in shards.items():
                moments = self._adamw.state[self._local[name]][kind] if shard.flat.numel() else shard.flat
                state[f"{kind}/{name}"] = Shard(moments.flatten(), shard.start, shard.shape)
        return state

    @property
    def optimizer_steps(self) -> int:
        return self._steps

    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        for key, shard in self.state().items():
            shard.flat.copy_(read(key, shard))
        self._steps = optimizer_steps
        for state in self._adamw.state.values():
            state["step"].fill_(optimizer_steps)

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def _shards(self) -> dict[str, Shard]:
        """The weights. FSDP2 gives rank r rows r * ceil(rows / ranks) onwards, as torch.chunk cuts."""
        shards = {}
        for name, p in self._sharded.items():
            rows = -(-p.shape[0] // self.world_size)
            start = min(self.rank * rows, p.shape[0]) * (p.numel() // p.shape[0])
            shards[name] = Shard(self._local[name].detach().flatten(), start, tuple(p.shape))
        return shards
