"""The progress of a run: its optimizer steps, some of which may be skipped, and their rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from train.base.wording import counted
from train.engine import Engine
from train.settings.settings import OptimizerSettings

_CALMER = (
    "give a smaller --lr than {:g}; if the last good checkpoint still explodes, resume from an "
    "earlier one"
)


@dataclass
class Progress:
    """The steps and samples of a run so far, and its skipped steps, whose loss or gradients were
    not finite, in all and in a row up to now.
    """

    step: int = 0
    samples: int = 0
    skipped: int = 0
    skips_in_a_row: int = 0

    def describe_skips(self, what: str, lr: float) -> str:
        """Return why steps were skipped, how many, and what to do. `lr` is the peak."""
        skipped = counted(
            self.skips_in_a_row, "step in a row was skipped", "steps in a row were skipped"
        )
        return f"step {self.step}: {what}; {skipped}: {_CALMER.format(lr)}"


def optimize(
    engine: Engine,
    progress: Progress,
    settings: OptimizerSettings,
    loss: float,
    lr: float,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Take an optimizer step, or skip it if loss or gradients are not finite. Return numbers to
    record. Raises FloatingPointError on every rank if too many steps in a row were skipped.
    """
    try:
        if not math.isfinite(loss):
            engine.clear_gradients()
            raise FloatingPointError(f"the loss is {loss}")
        grad_norm = engine.step(lr, settings.clip)
    except FloatingPointError as error:
        progress.skipped += 1
        progress.skips_in_a_row += 1
        say(f"step {progress.step}: skipped, {error}; {progress.skips_in_a_row} in a row")
        if progress.skips_in_a_row >= settings.max_skips:
            raise FloatingPointError(progress.describe_skips(str(error), settings.lr)) from error
        return {"skipped": progress.skipped}
    progress.skips_in_a_row = 0
    return {"loss": loss, "grad_norm": grad_norm}


def learning_rate(step: int, settings: OptimizerSettings) -> float:
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
