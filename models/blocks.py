"""A model's blocks, applied in turn, and what their forward saves for their backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_burst.base.kept import keep_results as keep_exchanged
from bmt_burst.offload import Offload

from .tiled import run_tiled

CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Runner:
    """Calls the parts of a block, except the attention.

    run    calls function(*inputs), and decides what is saved for the backward
    begin  calls a function that saves its input and its results only
    tile   how many tokens the part after the attention computes at a time. None: all
    """

    run: Callable
    begin: Callable
    tile: int | None = None

    def finish(
        self, part: Callable[..., Tensor], modules: Sequence[nn.Module], *inputs: Tensor
    ) -> Tensor:
        """Call the part after the attention, which computes each token alone.

        modules  those with parameters that it uses
        inputs   (..., any). The first one has the shape and dtype of the result
        """
        if self.tile is None:
            return self.run(part, *inputs)
        parameters = [p for module in modules for p in module.parameters()]
        return run_tiled(part, parameters, self.tile, *inputs)


@dataclass(frozen=True)
class Saving:
    """The tensors that blocks save in their forward for their backward.

    checkpointing  "none": all tensors. "selective": a block's input, and q, k, v, out and lse of
                   its attention; the rest is computed again, without the ring. "full": only its
                   input
    offload        save them in host memory. Not with "none", which would move the weights, too
    blocks         how many of a model's first blocks this applies to; the last ones, whose backward
                   runs first, save everything. None: it applies to all
    every          save only the input of every so many blocks. The backward then computes these
                   blocks again, and meanwhile they save what `checkpointing` says, on the device
    tile           how many tokens the part of a block after its attention computes at a time, in
                   all blocks. It saves its inputs, and its backward computes it again. None: all
    keep_results   whether blocks that run their attention again keep what ranks exchanged: choices
                   of sparse attention, and states of lightning attention
    """

    checkpointing: str = "none"
    offload: Offload | None = None
    blocks: int | None = None
    every: int | None = None
    tile: int | None = None
    keep_results: bool = False

    def __post_init__(self):
        kind = self.checkpointing
        if kind not in CHECKPOINTING:
            known = ", ".join(CHECKPOINTING)
            raise ValueError(f"checkpointing must be one of {known}, got {kind!r}")
        if self.offload and kind == "none":
            raise ValueError("offload needs checkpointing='selective' or 'full', got 'none'")
        for name, least in (("blocks", 0), ("every", 2)):
            value = getattr(self, name)
            if value is not None and (value < least or kind == "none"):
                raise ValueError(
                    f"{name} must be at least {least} and needs checkpointing='selective' or "
                    f"'full', got {value} with {kind!r}"
                )
        if self.blocks is not None and self.every is not None:
            raise ValueError(f"every={self.every} excludes blocks={self.blocks}")
        if self.tile is not None and self.tile < 1:
            raise ValueError(f"tile must be at least 1, got {self.tile}")

    def for_block(self, layer: int) -> Saving:
        """Return the tensors that block number `layer` saves."""
        if self.blocks is not None and layer >= self.blocks:
            return Saving(tile=self.tile)
        # a group of blocks is offloaded as a whole
        return self if self.every is None else replace(self, offload=None)

    def run(self, whole: Callable, *args: Any, keep: Sequence[Tensor] = ()) -> Any:
        """Compute a block's forward, whole(runner, *args), which calls its parts with the Runner.
        All blocks save the tensors `keep`, which are not moved to host memory.
        """
        if not torch.is_grad_enabled():
            return whole(Runner(_call, _call, self.tile), *args)
        run = recompute if self.checkpointing == "selective" else _call
        # an offload would move weights that a function saves
        runner = Runner(run, run if self.offload else _call, self.tile)
        with self._around(keep):
            if self.checkpointing == "full":
                return recompute(whole, runner, *args, keep_results=self.keep_results)
            return whole(runner, *args)

    def run_all(self, blocks: Any, x: Tensor, *args: Any, keep: Sequence[Tensor] = ()) -> Tensor:
        """Apply all `blocks` to x, in turn. They are iterable. `keep` is that of `run`."""
        if self.every is None or not torch.is_grad_enabled():
            return blocks(x, *args)
        in_order = list(blocks)
        for first in range(0, len(in_order), self.every):
            group = in_order[first : first + self.every]
            with self._around(keep):
                x = recompute(_apply, group, x, *args, keep_results=self.keep_results)
        return x

    def _around(self, keep: Sequence[Tensor]) -> AbstractContextManager:
        """Return the context in which a block's forward runs."""
        return self.offload.block(keep=keep) if self.offload else nullcontext()


class Layers(nn.ModuleList):
    """The blocks, applied in turn."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        """Apply all blocks to x."""
        return _apply(self, x, *args)


def recompute(function: Callable, *args: Any, keep_results: bool = False) -> Any:
    """Call function(*args), and save only `args`, and if asked the results that attention keeps."""
    contexts: dict[str, Any] = {"context_fn": keep_exchanged} if keep_results else {}
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **contexts)


def _call(function: Callable, *args: Any) -> Any:
    return function(*args)


def _apply(blocks: Iterable[Callable], x: Tensor, *args: Any) -> Tensor:
    """Apply blocks to x, in turn."""
    for block in blocks:
        x = block(x, *args)
    return x
