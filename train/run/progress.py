"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from train.base.wording import counted
from train.data.skips import Skips
from train.run.kinds import ModelConfig

_CALMER = (
    "give a smaller --lr than {:g}; if the last good checkpoint still explodes, resume from an "
    "earlier one"
)


@dataclass
class Progress:
    """The progress of a run: steps, samples read, skipped steps (their loss or gradients were not
    finite), and skipped steps in a row up to now.
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


@dataclass(frozen=True)
class Start:
    """The state from which a rank begins.

    progress     zero for a new run or a new stage
    model        the configuration, with the length that resumed weights were made for
    longest_row  the length of the longest row in all stages
    beside       the record of what stood beside the weights of --init-from (train/run/beside.py)
    skips        the ranges of the training data that are left out
    """

    progress: Progress
    model: ModelConfig
    longest_row: int
    beside: dict[str, Any] | None
    skips: Skips = field(default_factory=Skips)
