"""The torch engine: plain modules under FSDP2, AdamW on the local shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from .common import AdamW, Engine, Shard, ShardedAdamW, layers_name


class TorchEngine(Engine):
    """Shards `build()` over all ranks of torch.distributed, block by block.

    build   makes the model; called on the meta device
    dtype   of weights and activations; masters, gradients and AdamW are fp32
    seed    of the starting weights, which do not depend on the number of ranks
    keeps_weights
            whether a block's weights that were gathered for its forward stay in memory until its
            backward, instead of being gathered again
    """

    _has_whole_sums = False

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        adamw: AdamW | None = AdamW(),  # noqa: B008 - it is frozen
        keeps_weights: bool = False,
    ):
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        with torch.device("meta"):
            self.model = build()
        self._shard_model(dtype, keeps_weights)
        # DTensors, as are their gradients
        self._sharded: dict[str, Any] = dict(self.model.named_parameters())
        shards = {name: self._make_shard(p) for name, p in self._sharded.items()}
        self._optimizer = ShardedAdamW(shards, adamw)
        self._start_masters(seed)

    def _shard_model(self, dtype: torch.dtype, keeps_weights: bool) -> None:
        # init_device_mesh may make another group, without the world's timeout
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is initialised"
        mesh = DeviceMesh.from_group(world, self.device.type)
        # Inputs keep their dtype: RoPE tables are fp32 in every precision.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        layers: Any = self.model.get_submodule(layers_name(self.model))
        for module in [*layers, self.model]:
            # the outer module's own weights always stay
            reshard = not keeps_weights and module is not self.model
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
            # gradients are sums over ranks; the loss carries the scale
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        self.model.to_empty(device=self.device)

    def _make_shard(self, p: DTensor) -> Shard:
        """Return this rank's rows of a parameter. FSDP2 cuts rows like torch.chunk."""
        rows = -(-p.shape[0] // self.world_size)
        start = min(self.rank * rows, p.shape[0]) * (p.numel() // p.shape[0])
        return Shard(p.to_local().detach().view(-1), start, tuple(p.shape))

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        if self.world_size == 1:
            # There is nothing to sum over ranks. So FSDP2 adds to whole gradients, in one pass. To
            # sum shards takes five, and memory that only their stream may use again. In half
            # precision FSDP2 then needs a gradient of each weight before the last backward. Each
            # backward of these models has one of all weights.
            sharded: Any = self.model
            sharded.set_requires_gradient_sync(is_last)
            self._has_whole_sums = not is_last
        loss.backward()

    @torch.no_grad()  # or to_local() would take the host longer
    def step(self, lr: float, max_norm: float) -> float:
        grads = {name: p.grad.to_local() for name, p in self._sharded.items()}
        try:
            return self._optimizer.step(grads, lr, max_norm, self.sum)
        finally:
            self._reshard()
            self.clear_gradients()

    def _reshard(self) -> None:
        """Free gathered weights. A forward without a backward leaves some to the next one."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clear_gradients(self) -> None:
        assert not self._has_whole_sums, "FSDP2 keeps whole sums until the last backward of a step"
        for p in self._sharded.values():  # a module that is gathered has others
            p.grad = None

    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        super().load(read, optimizer_steps)
        self._reshard()

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()
