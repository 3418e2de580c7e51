"""Learning rate schedules and other rhythms of a run, as pure functions of the step."""

from __future__ import annotations

import math
from typing import Protocol


class Settings(Protocol):
    """The settings of a schedule, a part of TrainConfig's. `warmup` and `decay` are in steps."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def schedule(self) -> str: ...
    @property
    def warmup(self) -> int: ...
    @property
    def decay(self) -> int: ...
    @property
    def min_lr_ratio(self) -> float: ...


def _wsd(step: int, config: Settings) -> float:
    """Return the share of the peak: warm-up, stable, then exponential decay over the last `decay`
    steps (MiniCPM, arXiv 2404.06395, section 4).
    """
    decayed = step - (config.steps - config.decay)
    return config.min_lr_ratio ** (decayed / config.decay) if decayed > 0 else 1.0


def _cosine(step: int, config: Settings) -> float:
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (
        1 + math.cos(math.pi * _progress(step, config))
    )


def _linear(step: int, config: Settings) -> float:
    return 1 + (config.min_lr_ratio - 1) * _progress(step, config)


SCHEDULES = {"wsd": _wsd, "cosine": _cosine, "linear": _linear}


def learning_rate(step: int, config: Settings) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    return config.lr * SCHEDULES[config.schedule](step, config)


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after `step`; 0: never."""
    return every > 0 and step % every == 0


def _progress(step: int, config: Settings) -> float:
    """Return 0 at the end of warm-up and 1 at the end of the run."""
    return (step - config.warmup) / max(config.steps - config.warmup, 1)


def check_schedule(config: Settings) -> None:
    """Raise ValueError for settings of a schedule that do not fit together."""
    if not 0 <= config.min_lr_ratio <= 1:
        raise ValueError(
            f"--min-lr-ratio must be at least 0 and at most 1, got {config.min_lr_ratio}"
        )
    if config.min_lr_ratio == 0 and config.schedule == "wsd":
        raise ValueError(
            "--min-lr-ratio must be above 0 for --schedule wsd, which decays exponentially; "
            "other schedules may end at 0"
        )
    if config.warmup + config.decay > config.steps and config.schedule == "wsd":
        raise ValueError(
            f"--warmup-steps {config.warmup} and --decay-steps {config.decay} are together longer "
            f"than the run, --steps {config.steps}"
        )
