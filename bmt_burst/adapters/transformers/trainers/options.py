"""The options of `sequence_parallel`, and the trainers of TRL that were tested over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

GENERATING_OF_TRL = ("GRPOTrainer", "RLOOTrainer")
FOLDING_OF_TRL = (*GENERATING_OF_TRL, "DPOTrainer")  # their rows share prompts
TESTED_OF_TRL = (
    *("SFTTrainer", "DPOTrainer", "RewardTrainer", *GENERATING_OF_TRL),
    *("KTOTrainer", "ORPOTrainer", "CPOTrainer", "TPOTrainer"),
)


@dataclass(frozen=True)
class Options:
    """The options of `sequence_parallel`. Those `of_attention` are for burst_attn_func."""

    sp_size: int | None
    mesh: dist.DeviceMesh | None
    layout: str
    balanced: bool
    untested: bool
    loss_only: bool
    fold: bool
    of_attention: dict[str, Any]


def find_base_of_trl(trainer: type, names: Sequence[str]) -> type | None:
    """Return the first base of a class that is TRL's and has one of these names, or None."""
    bases = (base for base in trainer.__mro__ if base.__module__.startswith("trl."))
    return next((base for base in bases if base.__name__ in names), None)


def is_tested(trainer: type) -> bool:
    """Whether a class is a tested trainer of TRL's. Some of these are in a package of their own in
    trl.experimental, where classes of the same name may do something else.
    """
    name = trainer.__name__
    own = f"trl.experimental.{name.removesuffix('Trainer').lower()}."
    return name in TESTED_OF_TRL and f"{trainer.__module__}.".startswith(("trl.trainer.", own))
