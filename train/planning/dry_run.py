"""Plans of pretrain.py's own options: its --dry-run, what a run keeps for the backward, and advice
when memory runs out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import torch

from bmt_burst import kernels
from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.config import CPMConfig
from train.base import ranks
from train.base.files import print_error
from train.checkpoints.checkpoint import CheckpointError
from train.loop.building import Kept
from train.loop.stages import parse_run
from train.settings.config import TrainConfig

from .report import Budget, advice, describe, explain_shortage
from .search import (
    Cluster,
    Planned,
    as_run,
    find_longest,
    free_host_gib,
    plan,
    recommend,
    with_options,
)
from .seconds import GIB, GPUS, H200


def dry_run(argv: Sequence[str]) -> int:
    """Print the plan of a run, or of each of its stages, on rank 0. Return the exit code."""
    config, stages = parse_run(argv)
    if int(os.environ.get("RANK", 0)):
        return 0
    for stage in stages.all if stages else (None,):
        try:
            report = _report(stages.opening(stage) if stages and stage else config)
        except (ValueError, OSError, CheckpointError) as error:
            print_error(f"pretrain.py: {f'stage {stage.name}: ' if stage else ''}{error}")
            return 2
        print(f"stage {stage.number}, {stage.name}\n{report}\n" if stage else report)
    return 0


def _report(config: TrainConfig) -> str:
    """Return the plan of a run, and what is recommended if it does not fit."""
    planned = _plan(config)
    host_gib = free_host_gib(planned.cluster.of_host)
    cluster = dataclasses.replace(planned.cluster, host_gib=host_gib)
    planned = dataclasses.replace(planned, cluster=cluster)
    tokens = float(config.last_step * config.batch_size * config.seq_len)
    parts = [describe(planned, Budget(tokens))]
    given = with_options(planned, checkpointing_blocks=config.checkpointing_blocks)
    parts += [f"longest sequence with these options: {find_longest(given):,} tokens"]
    if not planned.fits:
        single = with_options(planned, micro_batch_size=config.micro_batch_size or 1)
        parts += [advice(planned, recommend(single))]
    if not torch.cuda.is_available():
        parts += ["This machine has no GPU: memory and rates are those of an H200."]
    return "\n\n".join(parts)


def advise(config: TrainConfig) -> str:
    """Return the largest part of the memory of a run, and the options of a smaller plan."""
    try:
        return explain_shortage(_plan(config))
    except (ValueError, OSError, CheckpointError) as error:
        return str(error)


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


def _plan(config: TrainConfig) -> Planned:
    """Plan a run on the GPUs of this machine, or on H200 if it has none."""
    gpus = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else config.processes
    has_bmtrain = kernels.installed("bmtrain") or not torch.cuda.is_available()
    hardware, gib = H200, H200.gib  # if this machine has no GPU
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name().lower().replace(" ", "")
        hardware = next((gpu for known, gpu in GPUS.items() if known in name), H200)
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    return as_run(plan(config, Cluster(gpus, gib, hardware), config.pick_engine(has_bmtrain)))
