"""A model's blocks, applied in turn, and what their forward saves for their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_burst import sparse
from bmt_burst.offload import Offload

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Saving:
    """The tensors that blocks save in their forward for their backward.

    checkpointing  "none": all tensors. "selective": a block's input, and q, k, v, out and lse of
                   its attention; the rest is computed again, without the ring. "full": only its
                   input
    offload        save them in host memory. Not with "none", which would move the weights, too
    blocks         how many of a model's first blocks this applies to; the last ones, whose backward
                   runs first, save everything. None: it applies to all
    keep_choices   whether "full" also keeps the choices of sparse attention
    """

    checkpointing: str = "none"
    offload: Offload | None = None
    blocks: int | None = None
    keep_choices: bool = False

    def __post_init__(self):
        if self.checkpointing not in CHECKPOINTING:
            raise ValueError(
                f"checkpointing must be one of {', '.join(CHECKPOINTING)}, "
                f"got {self.checkpointing!r}"
            )
        if self.offload and self.checkpointing == "none":
            raise ValueError("offload needs checkpointing='selective' or 'full', got 'none'")
        if self.blocks is not None and (self.blocks < 0 or self.checkpointing == "none"):
            raise ValueError(
                "blocks must be at least 0 and needs checkpointing='selective' or 'full', "
                f"got {self.blocks} with {self.checkpointing!r}"
            )

    def for_block(self, layer: int) -> Saving:
        """Return what block number `layer` saves."""
        return self if self.blocks is None or layer < self.blocks else Saving()

    def run(self, whole: Callable, *args: Any, keep: Sequence[Tensor] = ()) -> Any:
        """Compute a block's forward, whole(run, *args).

        `whole` calls the block's parts, except the attention, as run(part, *inputs). `keep` are
        tensors that all blocks save. They are not moved to host memory.
        """
        if not torch.is_grad_enabled():
            return whole(_call, *args)
        with self._around(keep):
            if self.checkpointing == "full":
                return recompute(whole, _call, *args, keep_choices=self.keep_choices)
            return whole(recompute if self.checkpointing == "selective" else _call, *args)

    def _around(self, keep: Sequence[Tensor]) -> AbstractContextManager:
        """Return the context in which a block's forward runs."""
        return self.offload.block(keep=keep) if self.offload else nullcontext()


class Layers(nn.ModuleList):
    """The blocks, applied in turn."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Apply all blocks to x."""
        for block in self:
            x = block(x, *args)
        return x


def recompute(function: Callable, *args: Any, keep_choices: bool = False) -> Any:
    """Call function(*args), and save only `args` for the backward. With `keep_choices` also save
    the choices of sparse attention in it.
    """
    contexts: dict[str, Any] = {"context_fn": sparse.keep_choices} if keep_choices else {}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **contexts)


def _call(function: Callable, *args: Any) -> Any:
    return function(*args)
