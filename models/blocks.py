"""A model's blocks: applied in turn, and what they keep from their forward for their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_burst.offload import Offload

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Saving:
    """What blocks keep from their forward for their backward.

    checkpointing  "none": all; "selective": its input and q, k, v, out and lse of the attention,
                   all else is computed again (the ring is not); "full": its input only
    offload        keep that in host memory; not with "none", which would move the weights too
    blocks         how many of a model's blocks this is for, the first ones; the others, whose
                   backward comes first, keep all. None: for all
    """

    checkpointing: str = "none"
    offload: Offload | None = None
    blocks: int | None = None

    def __post_init__(self):
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"checkpointing must be one of {', '.join(CHECKPOINTING)}, got {self.checkpointing!r}"
            )
        if self.offload and self.checkpointing == "none":
            raise ValueError("offloading needs checkpointing, selective or full")
        if self.blocks is not None and (self.blocks < 0 or self.checkpointing == "none"):
            raise ValueError(
                f"checkpointing of some blocks needs a mode, selective or full, and a number of blocks, got "
                f"{self.checkpointing!r} for {self.blocks}"
            )

    def of(self, layer: int) -> Saving:
        """What block number `layer` keeps."""
        return self if self.blocks is None or layer < self.blocks else Saving()

    def run(self, whole: Callable, *args: Any, keep: Sequence[Tensor] = ()) -> Any:
        """A block's forward: whole(run, *args), which calls its parts, all but the attention, as
        run(part, *inputs).

        keep  tensors that all blocks save, which are not moved to host memory
        """
        if not torch.is_grad_enabled():
            return whole(_called, *args)
        with self._around(keep):
            if self.checkpointing == "full":
                return recomputed(whole, _called, *args)
            return whole(recomputed if self.checkpointing == "selective" else _called, *args)

    def _around(self, keep: Sequence[Tensor]) -> AbstractContextManager:
        return self.offload.block(keep=keep) if self.offload else nullcontext()


class Layers(nn.ModuleList):
    """The blocks, applied in turn."""

    def forward(self, x: Tensor, *args) -> Tensor:
        for block in self:
            x = block(x, *args)
        return x


def recomputed(function: Callable, *args):
    """function(*args), of which only `args` are kept for the backward."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def _called(function: Callable, *args):
    return function(*args)
