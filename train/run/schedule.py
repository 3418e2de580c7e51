"""Learning rate schedules and other rhythms of a run, as pure functions of the step."""

from __future__ import annotations

import math

from train.run.settings import Settings


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1."""
    if step <= settings.warmup:
        return settings.lr * step / settings.warmup
    least = settings.min_lr_ratio
    if settings.schedule == "wsd":
        # MiniCPM, arXiv 2404.06395, section 4: stable, then exponential decay
        decayed = max(step - (settings.steps - settings.decay), 0)
        return settings.lr * (least ** (decayed / settings.decay) if decayed else 1.0)
    progress = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    if settings.schedule == "linear":
        return settings.lr * (1 + (least - 1) * progress)
    return settings.lr * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress)))


def is_due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after `step`; 0: never."""
    return every > 0 and step % every == 0
