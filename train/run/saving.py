"""The options of a run that say what blocks save for their backward."""

from __future__ import annotations

from typing import Protocol

from bmt_burst.offload import Offload
from models.blocks import Saving


class SavingOptions(Protocol):
    """The fields of TrainConfig that are read here."""

    @property
    def checkpointing(self) -> str: ...
    @property
    def checkpointing_blocks(self) -> int | None: ...
    @property
    def checkpointing_every(self) -> int | None: ...
    @property
    def mlp_tile(self) -> int | None: ...
    @property
    def offload(self) -> bool: ...


def check_saving(config: SavingOptions) -> None:
    """Raise ValueError for options that do not go together."""
    every = config.checkpointing_every
    needing = {
        "--offload": config.offload or None,
        "--checkpointing-blocks": config.checkpointing_blocks,
        "--checkpointing-every": every,
    }
    for flag, value in needing.items():
        if value is not None and config.checkpointing == "none":
            raise ValueError(f"{flag} needs --checkpointing selective or full")
    if every is not None and every < 2:
        raise ValueError(f"--checkpointing-every must be at least 2, got {every}")
    if every is not None and config.checkpointing_blocks is not None:
        raise ValueError("--checkpointing-every excludes --checkpointing-blocks: give one of them")


def make_saving(config: SavingOptions) -> Saving:
    """Return what blocks save for the backward."""
    return Saving(
        config.checkpointing,
        Offload() if config.offload else None,
        blocks=config.checkpointing_blocks,
        every=config.checkpointing_every,
        tile=config.mlp_tile,
    )
