"""The BMTrain engine: BMTrain's ZeRO-3 for plain modules, and AdamW on each rank's shards.

`bmtrain.save(engine.model, file)` writes the model under its own names. BMTrain does not checkpoint
blocks, since it would run the ring again in the backward: the model does.

Gradients are reduced in the weights' dtype. Their sum over micro-batches is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .common import AdamW, Engine, Shard, ShardedAdamW, layers_name

_FIRST_LOSS_SCALE = 2.0**16
_DOUBLE_EVERY = 1024  # steps in a row that did not overflow


class BMTrainEngine(Engine):
    """Shards `build()` over all of BMTrain's ranks, after bmtrain.init_distributed.

    build    makes the model; called on the meta device
    dtype    of weights and activations, and of reduced gradients
    seed     of the starting weights, which do not depend on the number of ranks
    offload  keep masters and AdamW's state in host memory, and step there
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        adamw: AdamW | None = AdamW(),  # noqa: B008 - it is frozen
        offload: bool = False,
    ):
        import bmtrain

        from bmt_burst.adapters.bmtrain import distribute

        self._bmtrain = bmtrain
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._scales_loss = dtype == torch.float16
        self.loss_scale = _FIRST_LOSS_SCALE if self._scales_loss else 1.0
        with torch.device("meta"):
            self.model = build()
        # empty until the masters are stored below
        self._parameters = distribute(
            self.model, lambda _, p: torch.empty(p.shape, dtype=dtype, device=self.device)
        )
        # Each block keeps its parameters in one storage. A parameter's own data is then this rank's
        # shard of it.
        at = layers_name(self.model)
        layers: Any = self.model.get_submodule(at)
        self._blocks = [bmtrain.Block(block, use_checkpoint=False) for block in layers]
        self.model.set_submodule(at, bmtrain.TransformerBlockList(self._blocks))
        shards = {name: self._make_shard(p, offload) for name, p in self._parameters.items()}
        self._optimizer = ShardedAdamW(shards, adamw)
        self._grads: dict[str, Tensor] = {}  # sums over the micro-batches since the last step
        self._start_masters(seed)
        self._store_weights()

    def _make_shard(self, p: Any, offload: bool) -> Shard:
        master = p.data.detach().to("cpu" if offload else self.device, torch.float32)
        start = (p._start_partition or 0) if master.numel() else 0
        return Shard(master.view(-1), start, tuple(p._original_shape))

    def backward(self, loss: Tensor, is_last: bool = True) -> None:
        # gradients of the last micro-batch, to which BMTrain would add in the weights' dtype
        self._collect_gradients()
        (loss * self.loss_scale).backward()
        # gradients are reduced on this stream
        torch.cuda.current_stream().wait_stream(self._bmtrain.config["load_stream"])

    def step(self, lr: float, max_norm: float) -> float:
        self._collect_gradients()
        grads = {
            name: self._grads[name] if name in self._grads else torch.zeros_like(p)
            for name, p in self._parameters.items()
        }
        try:
            weights = {name: p.data for name, p in self._parameters.items()}
            norm = self._optimizer.step(grads, lr, max_norm, self.sum, self.loss_scale, weights)
        except FloatingPointError as error:
            if not self._scales_loss:
                raise
            self.loss_scale, self.steps_at_scale = self.loss_scale / 2, 0
            raise FloatingPointError(
                f"{error}; the loss scale is now {self.loss_scale:g}"
            ) from error
        finally:
            self.clear_gradients()  # also makes the next gather wait for the weights
        self.steps_at_scale += 1
        if self._scales_loss and self.steps_at_scale == _DOUBLE_EVERY:
            self.loss_scale, self.steps_at_scale = self.loss_scale * 2, 0
        return norm

    def _store_weights(self) -> None:
        """Round the masters to the weights. The next gather waits for this."""
        for name, shard in self._optimizer.shards.items():
            self._parameters[name].data.copy_(shard.flat)
        self._bmtrain.config["load_stream"].wait_stream(torch.cuda.current_stream())

    def clear_gradients(self) -> None:
        self._grads.clear()
        self._drop_gradients()

    def _collect_gradients(self) -> None:
        """Add the gradients of the last micro-batch to the sums."""
        for name, p in self._parameters.items():
            if p.grad is not None:
                so_far = self._grads.get(name)
                self._grads[name] = p.grad if so_far is None else so_far.float().add_(p.grad)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Drop the gradients that BMTrain holds, once they have been read."""
        self._bmtrain.config["load_stream"].wait_stream(torch.cuda.current_stream())
        for block in self._blocks:
            for storage in block._storage_params.values():
                storage.grad = None
        for p in self._parameters.values():
            p.grad = None

    def load(self, read: Callable[[str, Shard], Tensor], optimizer_steps: int) -> None:
        super().load(read, optimizer_steps)
        self._store_weights()

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        self._bmtrain.nccl.allReduce(
            total.storage(), total.storage(), "sum", self._bmtrain.config["comm"]
        )
        return total.tolist()
