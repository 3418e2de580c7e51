"""Blocks that need not compute anything again, since the memory of a run's GPUs is enough."""

from __future__ import annotations

import dataclasses

import torch

from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.blocks import Saving
from models.config import CPMConfig
from train.base import ranks
from train.run.config import TrainConfig

from .search import Cluster, as_run, plan
from .seconds import GIB, H200


def find_saving(config: TrainConfig, device: torch.device) -> Saving:
    """Return what blocks save. With --checkpointing selective alone, on GPUs, only as many blocks
    recompute as memory needs, and the log states the number. Every rank must call this.

    It must be called before the model is built, when memory is free.
    """
    if device.type != "cuda" or not isinstance(config.model_config(), CPMConfig):
        return config.saving()
    free, _ = torch.cuda.mem_get_info(device)
    gib = min(ranks.gather(free)) / GIB
    engine = "bmtrain" if initialized_bmtrain() else "torch"
    # rates do not matter for what fits
    planned = plan(config, Cluster(ranks.world_size(), gib, H200), engine)
    blocks = as_run(planned).config.checkpointing_blocks
    if blocks != config.checkpointing_blocks:
        ranks.say(
            f"{blocks} of {planned.model.num_layers} blocks recompute in the backward: memory has "
            "room for what the others save; --checkpointing-blocks sets another number"
        )
    return dataclasses.replace(config.saving(), blocks=blocks)
