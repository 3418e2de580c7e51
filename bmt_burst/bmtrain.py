"""For scripts on BMTrain: sequence parallel attention in its module classes. Layers need
bmtrain.init_distributed.

sp = bmt_burst.init_sequence_parallel(sp_size=8)
self.attention = BurstAttention(4096, 32, num_kv_heads=8, sp=sp, dtype=torch.bfloat16)
...
x = x + self.attention(norm(x), *rope_tables(sp.positions(seq_len, "cuda"),
self.attention.head_dim))
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from bmtrain import DistributedModule, DistributedParameter, ParameterInitializer
from bmtrain.nn.linear import OpLinear
from torch import Tensor, nn

from . import nn as burst_nn


class BurstAttention(burst_nn.BurstAttention):
    """bmt_burst.nn.BurstAttention as a DistributedModule, with DistributedParameters of `dtype`;
    takes its arguments.

    bmtrain.init_parameters fills the projections from a normal distribution with `init_std`, as
    does this; biases and sinks start as 0 and the weights of norms as 1.
    """

    def __init__(self, *args, dtype: torch.dtype = torch.half, init_std: float = 0.02, **options):
        super().__init__(*args, **options)
        normal = functools.partial(nn.init.normal_, std=init_std)

        def filler(name: str) -> Callable[[Tensor], Tensor]:
            return (
                nn.init.zeros_
                if name.endswith(("bias", "sinks"))
                else nn.init.ones_
                if "_norm." in name
                else normal
            )

        distribute(
            self,
            lambda name, p: filler(name)(torch.empty_like(p, dtype=dtype, device="cuda")),
            lambda name: ParameterInitializer(filler(name)),
        )


def distribute(
    module: nn.Module,
    start: Callable[[str, Tensor], Tensor],
    init_method: Callable[[str], ParameterInitializer] | None = None,
) -> dict[str, DistributedParameter]:
    """Makes a torch module and all in it DistributedModules, in place; returns the parameters by
    name.

    Each parameter becomes a DistributedParameter that holds what `start(name, parameter)` returns,
    and that bmtrain.init_parameters fills by `init_method(name)`. One after the other: no more than
    one is whole at a time.
    """
    parameters = {}
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
    """`cls` as a DistributedModule, which gathers parameters when they are read."""
    members = {}
    if cls is nn.Linear:
        # F.linear would keep a view of the gathered weight until the backward, and ZeRO-3 would
        # save nothing.
        members["forward"] = lambda self, x: OpLinear.apply(x, self.weight, self.bias)
    return type(cls.__name__, (cls, DistributedModule), members)
