"""The groups of ranks and the engine of a run. All ranks build them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bmt_burst import SequenceParallel, init_sequence_parallel
from bmt_burst.transport.bmtrain import initialized_bmtrain
from models.blocks import Saving
from train.base import ranks
from train.base.wording import counted
from train.data.source import Source
from train.engine import Engine
from train.engine.common import AdamW
from train.engine.fp8 import convert
from train.registry import load
from train.run.distributed import rank_timeout
from train.settings.config import TrainConfig, check_strategy
from train.settings.kinds import ModelConfig, kind_of
from train.settings.settings import DTYPES


@dataclass(frozen=True)
class Kept:
    """The tensors that a rank keeps from forward to backward.

    saving   what blocks save
    weights  whether the torch engine keeps the weights that it gathered
    """

    saving: Saving
    weights: bool = False


def check_world(config: TrainConfig) -> None:
    """Raise ValueError if groups of --sp-size ranks do not make the world."""
    if (world := ranks.world_size()) % config.sp_size:
        raise ValueError(
            f"--sp-size {config.sp_size} does not divide the world of {counted(world, 'rank')}"
        )


def make_groups(config: TrainConfig, data: Source | None = None) -> SequenceParallel:
    """Make the groups that share sequences. Raises ValueError if ranks or options do not fit."""
    check_world(config)
    sp = init_sequence_parallel(
        config.sp_size,
        layout="zigzag" if config.layout == "auto" else config.layout,
        # ulysses takes one group, on any hosts
        inner_size=1 if config.strategy == "ulysses" else config.inner_size,
        ulysses_size=config.ulysses_size,
        timeout=rank_timeout(config),
    )
    group_size = sp.rings.inner.size
    check_strategy(config, group_size, data.example_scores if data else None)
    return sp


def make_engine(
    config: TrainConfig,
    model: ModelConfig,
    sp: SequenceParallel,
    device: torch.device,
    kept: Kept | None = None,
    trains: bool = True,
) -> Engine:
    """Build the model on the chosen engine, with optimizer state if it `trains`. `kept` is by
    default what the config says.
    """
    kept = kept or Kept(config.saving())
    make = load(kind_of(model).model)
    adamw = AdamW(betas=(config.beta1, config.beta2), weight_decay=config.weight_decay)
    options: dict[str, Any] = {
        "dtype": DTYPES[config.dtype],
        "seed": config.seed,
        "adamw": adamw if trains else None,
    }

    def build() -> torch.nn.Module:
        built: torch.nn.Module = make(model, sp, kept.saving, **config.attention)
        if config.fp8:
            engine = "" if config.engine == "torch" else "; --engine auto is torch for --fp8"
            ranks.say(convert(built) + engine)
        return built

    if initialized_bmtrain():
        from train.engine.bmtrain import BMTrainEngine

        return BMTrainEngine(build, **options, offload=config.offload_optimizer)
    # imported late: it takes seconds, which the launcher and refused runs need not spend
    from train.engine.torch import TorchEngine

    return TorchEngine(build, **options, device=device, keeps_weights=kept.weights)
