"""Sequence parallel attention in BMTrain's module classes, for scripts on BMTrain.

`bmt_burst.bmtrain` has its public names. Layers need bmtrain.init_distributed.

    sp = bmt_burst.init_sequence_parallel(sp_size=8)
    self.attention = BurstAttention(4096, 32, num_kv_heads=8, sp=sp, dtype=torch.bfloat16)
    ...
    tables = rope_tables(sp.positions(seq_len, "cuda"), self.attention.head_dim)
    x = x + self.attention(norm(x), *tables)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from bmtrain import DistributedModule, DistributedParameter, ParameterInitializer
from bmtrain.nn.linear import OpLinear
from torch import Tensor, nn

from .. import nn as burst_nn


class _DistributedLayer(nn.Module):
    """A layer that is distributed once it is made."""

    def __init__(
        self, *args: Any, dtype: torch.dtype = torch.half, init_std: float = 0.02, **options: Any
    ):
        super().__init__(*args, **options)
        normal = functools.partial(nn.init.normal_, std=init_std)

        def filler(name: str) -> Callable[[Tensor], Tensor]:
            if name.endswith(("bias", "sinks")):
                return nn.init.zeros_
            return nn.init.ones_ if "_norm." in name else normal

        distribute(
            self,
            lambda name, p: filler(name)(torch.empty_like(p, dtype=dtype, device="cuda")),
            lambda name: ParameterInitializer(filler(name)),
        )


class BurstAttention(_DistributedLayer, burst_nn.BurstAttention):
    """bmt_burst.nn.BurstAttention as a DistributedModule, with parameters of `dtype`, by default
    fp16.

    Projections start from a normal distribution with `init_std`, by default 0.02, biases and sinks
    as 0, and the weights of norms as 1. bmtrain.init_parameters fills them in the same way.
    """


class LightningAttention(_DistributedLayer, burst_nn.LightningAttention):
    """bmt_burst.nn.LightningAttention in the same form as BurstAttention."""


def distribute(
    module: nn.Module,
    start: Callable[[str, Tensor], Tensor],
    init_method: Callable[[str], ParameterInitializer] | None = None,
) -> dict[str, DistributedParameter]:
    """Turn a torch module and all inside it into DistributedModules, in place. Return the
    parameters by name.

    Each parameter becomes a DistributedParameter. It starts with `start(name, parameter)`, and
    bmtrain.init_parameters fills it by `init_method(name)`. Only one is whole at a time.
    """
    parameters: dict[str, DistributedParameter] = {}
    for path, part in module.named_modules():
        for leaf, p in part._parameters.items():
            if p is not None:
                name = f"{path}.{leaf}".removeprefix(".")
                parameters[name] = part._parameters[leaf] = DistributedParameter(
                    start(name, p), init_method=init_method and init_method(name)
                )
        part.__class__ = _distributed_class(part.__class__)
    return parameters


@functools.cache
def _distributed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return `cls` as a DistributedModule, which gathers parameters when they are read."""
    members: dict[str, Any] = {"distributed_from": cls}
    if cls is nn.Linear:
        # F.linear would keep a view of the gathered weight until the backward, so ZeRO-3 would save
        # no memory.
        members["forward"] = lambda self, x: OpLinear.apply(x, self.weight, self.bias)
    return type(cls.__name__, (cls, DistributedModule), members)
