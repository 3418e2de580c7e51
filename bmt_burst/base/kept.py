"""Choices that are kept while activation checkpointing drops everything else.

A checkpointed function runs again in the backward. To choose again would gather all keys again and
score them. So the first run keeps its choices, and the second takes them in the same order.

A call cannot find out which first run its recomputation belongs to. So the caller states it:
`keep_choices` makes the contexts of one checkpointed function, as torch's checkpointing without
reentrance takes them. `Choices` is for all other ways to checkpoint.

Checkpointed functions may be nested. The outer one's recomputation runs the inner one for the first
time again. Then the inner one takes its choices from the outer one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token

import torch
from torch import Tensor

logger = logging.getLogger("bmt_burst")


def keep_choices() -> tuple[KeptChoices, KeptChoices]:
    """Return the contexts of a first run and of its recomputation.

    Pass it as `context_fn` to torch.utils.checkpoint.checkpoint(..., use_reentrant=False). All
    ranks of a group must do so, or none.
    """
    kept: list[Tensor] = []
    return KeptChoices(kept, recomputes=False), KeptChoices(kept, recomputes=True)


class Choices:
    """The choices of one forward of a model, for the recomputations of its layers.

    It fits every kind of activation checkpointing, also reentrant ones and BMTrain's blocks. Make
    one for each forward of the model, and pass it to each layer as an argument, so that a
    recomputation gets the same one:

        class Layer(nn.Module):
            def forward(self, x, choices):
                with choices.of(self):
                    return x + self.attention(x)

        choices = bmt_burst.sparse.Choices()
        for layer in layers:
            x = checkpoint(layer, x, choices, use_reentrant=True)

    All ranks of a group must do so, or none.
    """

    def __init__(self) -> None:
        self._recomputations: dict[Hashable, KeptChoices] = {}

    def of(self, layer: Hashable) -> KeptChoices:
        """Return the context of one run of `layer`, which is the layer itself or a name.

        Its first run keeps its choices. Recomputations, which run inside a backward, take them.
        Raises ValueError if the layer runs twice in a forward.
        """
        again = self._recomputations.get(layer)
        if again is None:
            first, self._recomputations[layer] = keep_choices()
            return first
        if not _is_in_backward():
            raise ValueError(
                "expected one run of each layer, and recomputations inside of a backward; got two "
                "runs of a layer in one forward: make a Choices for each forward, and give each "
                "run of a layer another name"
            )
        return again


class KeptChoices:
    """A context in which choices are kept, or taken if it or one around it `recomputes`."""

    def __init__(self, kept: list[Tensor], recomputes: bool):
        self.kept, self.recomputes = kept, recomputes
        self._taken = 0
        self._tokens: list[Token[tuple[KeptChoices, ...]]] = []

    def __enter__(self) -> None:
        self._taken = 0
        if not self.recomputes:
            self.kept.clear()
        self._tokens.append(_contexts.set((*_contexts.get(), self)))

    def __exit__(self, *_: object) -> None:
        _contexts.reset(self._tokens.pop())

    def take(self) -> Tensor:
        """Return the next choice of the first run. Raises RuntimeError if there is none."""
        if self._taken == len(self.kept):
            raise RuntimeError(
                f"expected a recomputation with {len(self.kept)} calls of sparse attention, as in "
                "the first run, got more"
            )
        self._taken += 1
        return self.kept[self._taken - 1]


# the contexts that a call is in, the outermost first
_contexts: ContextVar[tuple[KeptChoices, ...]] = ContextVar("kept_choices", default=())


def is_recomputing() -> bool:
    """Whether calls take the choices of an earlier run."""
    return any(context.recomputes for context in _contexts.get())


def find_choice(choose: Callable[[], Tensor]) -> Tensor:
    """Return the choice that an earlier run kept for this call. If nothing recomputes, choose.

    All contexts that recompute take it. The others keep it for their own recomputations.
    """
    taken = [context.take() for context in _contexts.get() if context.recomputes]
    if not taken and _is_in_backward():
        _warn_of_choosing_again()
    choice = taken[-1] if taken else choose()
    for context in _contexts.get():
        if not context.recomputes:
            context.kept.append(choice)
    return choice


def _is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread, as it does in a recomputation."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _warn_of_choosing_again() -> None:
    """Warn once in each process."""
    logger.warning(
        "sparse attention chooses its blocks again in a recomputation, which costs time: pass "
        "context_fn=bmt_burst.sparse.keep_choices and use_reentrant=False to "
        "torch.utils.checkpoint, or use bmt_burst.sparse.Choices"
    )
