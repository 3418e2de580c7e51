"""Blocks that need not compute anything again, since the memory of this run's GPUs is enough."""

from __future__ import annotations

import dataclasses

import torch

from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.config import CPMConfig
from train.base import ranks
from train.planning.search import Cluster, as_run, plan
from train.planning.seconds import GIB, H200
from train.run.config import TrainConfig
from train.run.kinds import ModelConfig


def fit_memory(config: TrainConfig, model: ModelConfig, device: torch.device) -> TrainConfig:
    """Return the config with as few blocks that recompute as memory needs, if it lets the run
    choose: with --checkpointing selective alone, on GPUs. Say it. Every rank must call this.

    It must be called before the model is built, when memory is free.
    """
    if device.type != "cuda" or not isinstance(model, CPMConfig):
        return config
    free, _ = torch.cuda.mem_get_info(device)
    gib = min(ranks.gather(free)) / GIB
    engine = "bmtrain" if initialized_bmtrain() else "torch"
    # rates do not matter for what fits
    planned = plan(config, Cluster(ranks.world_size(), gib, H200), engine)
    blocks = as_run(planned).config.checkpointing_blocks
    if blocks == config.checkpointing_blocks:
        return config
    ranks.say(
        f"{blocks} of {model.num_layers} blocks recompute in the backward: the plan of memory has "
        "room for what the others save; --checkpointing-blocks chooses another number"
    )
    return dataclasses.replace(config, checkpointing_blocks=blocks)
