"""Trainers of TRL that were tested over ranks."""

from __future__ import annotations

TESTED_OF_TRL = (
    *("SFTTrainer", "DPOTrainer", "RewardTrainer"),
    *("KTOTrainer", "ORPOTrainer", "CPOTrainer", "TPOTrainer"),
)


def is_tested(trainer: type) -> bool:
    """Whether a class is a tested trainer of TRL's. Some of these are in a package of their own in
    trl.experimental, where classes of the same name may do something else.
    """
    name = trainer.__name__
    own = f"trl.experimental.{name.removesuffix('Trainer').lower()}."
    return name in TESTED_OF_TRL and f"{trainer.__module__}.".startswith(("trl.trainer.", own))
