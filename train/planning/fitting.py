"""The tensors that a run keeps from forward to backward, by the memory of its GPUs."""

from __future__ import annotations

import dataclasses

import torch

from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.config import CPMConfig
from train.base import ranks
from train.loop.building import Kept
from train.settings.config import TrainConfig

from .search import Cluster, as_run, plan
from .seconds import GIB, H200


def fit_memory(config: TrainConfig, device: torch.device) -> Kept:
    """Return what a run keeps from forward to backward. On GPUs it is planned by `as_run`, and the
    log tells it. Every rank must call this before the model is built, when memory is free.
    """
    if device.type != "cuda" or not isinstance(config.model_config(), CPMConfig):
        return Kept(config.saving())
    free, _ = torch.cuda.mem_get_info(device)
    gib = min(ranks.gather(free)) / GIB
    engine = "bmtrain" if initialized_bmtrain() else "torch"
    # rates do not matter for what fits
    planned = as_run(plan(config, Cluster(ranks.world_size(), gib, H200), engine))
    blocks = planned.config.checkpointing_blocks
    if blocks != config.checkpointing_blocks:
        ranks.say(
            f"{blocks} of {planned.model.num_layers} blocks recompute in the backward: memory has "
            "room for what the others save; --checkpointing-blocks sets another number"
        )
    return Kept(dataclasses.replace(config.saving(), blocks=blocks), planned.keeps_weights)
