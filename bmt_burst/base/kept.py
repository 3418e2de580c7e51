"""Results that are kept while activation checkpointing drops everything else: the choices of sparse
attention, and the states of lightning attention.

To find them again in a recomputation, ranks would exchange tensors again. So the first run keeps
them, and the second takes them in the same order. A call cannot find out which first run its
recomputation belongs to: the caller states it with `keep_results` or `Results`.

Checkpointed functions may be nested. The outer one's recomputation runs the inner one for the first
time again. Then the inner one takes its results from the outer one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token

import torch
from torch import Tensor

from .dtypes import accumulator_dtype

logger = logging.getLogger("bmt_burst")


def keep_results() -> tuple[KeptResults, KeptResults]:
    """Return the contexts of a first run and of its recomputation.

    Pass it as `context_fn` to torch.utils.checkpoint.checkpoint(..., use_reentrant=False). All
    ranks of a group must do so, or none.
    """
    kept: list[Tensor] = []
    return KeptResults(kept, recomputes=False), KeptResults(kept, recomputes=True)


class Results:
    """The kept results of one forward of a model, for the recomputations of its layers.

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
        self._recomputations: dict[Hashable, KeptResults] = {}

    def of(self, layer: Hashable) -> KeptResults:
        """Return the context of a run of `layer`, which is the layer itself or a name.

        Raises ValueError if the layer runs twice in a forward.
        """
        again = self._recomputations.get(layer)
        if again is None:
            first, self._recomputations[layer] = keep_results()
            return first
        if not is_in_backward():
            raise ValueError(
                "expected one run of each layer, and recomputations inside of a backward; got two "
                "runs of a layer in one forward: make a Choices for each forward, and give each "
                "run of a layer another name"
            )
        return again


class KeptResults:
    """A context in which results are kept, or taken if it or one around it `recomputes`."""

    def __init__(self, kept: list[Tensor], recomputes: bool):
        self.kept, self.recomputes = kept, recomputes
        self._taken = 0
        self._tokens: list[Token[tuple[KeptResults, ...]]] = []

    def __enter__(self) -> None:
        self._taken = 0
        if not self.recomputes:
            self.kept.clear()
        self._tokens.append(_contexts.set((*_contexts.get(), self)))

    def __exit__(self, *_: object) -> None:
        _contexts.reset(self._tokens.pop())

    def take(self) -> Tensor:
        """Return the next result of the first run. Raises RuntimeError if there is none."""
        if self._taken == len(self.kept):
            raise RuntimeError(
                f"expected a recomputation with {len(self.kept)} calls that keep results, as in "
                "the first run, got more"
            )
        self._taken += 1
        return self.kept[self._taken - 1]


# the contexts that a call is in, the outermost first
_contexts: ContextVar[tuple[KeptResults, ...]] = ContextVar("kept_results", default=())


def is_recomputing() -> bool:
    """Whether calls take the results of an earlier run."""
    return any(context.recomputes for context in _contexts.get())


def find_kept(find: Callable[[], Tensor], finding: str) -> Tensor:
    """Return the result that an earlier run kept for this call. If nothing recomputes, find it.

    All contexts that recompute take it. The others keep it for their own recomputations. A process
    that finds it again reports `finding`.
    """
    taken = [context.take() for context in _contexts.get() if context.recomputes]
    if not taken and is_in_backward():
        _warn_of_finding_again(finding)
    result = taken[-1] if taken else find()
    for context in _contexts.get():
        if not context.recomputes:
            context.kept.append(result)
    return result


def is_in_backward() -> bool:
    """Whether autograd is running a backward on this thread, as it does in a recomputation."""
    return torch._C._current_graph_task_id() != -1


@functools.cache
def _warn_of_finding_again(finding: str) -> None:
    """Warn once in each process."""
    logger.warning(
        f"{finding} again in a recomputation, which costs time: pass "
        "context_fn=bmt_burst.sparse.keep_choices and use_reentrant=False to "
        "torch.utils.checkpoint, or use bmt_burst.sparse.Choices"
    )


def find_difference(x: Tensor, kept: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the difference of x from what an earlier run kept, relative to the most that rounding
    to `dtype`, by default that of `kept`, does.

    Runs with the same kernels are equal. A compiled model rounds elsewhere without a graph: in tens
    of layers that adds up to several eps in an entry, but not in a scale of all, where independent
    roundings cancel. A scale of fp32 may differ by products in TF32.
    """
    eps = torch.finfo(dtype or kept.dtype).eps
    x, kept = (t.to(accumulator_dtype(kept.dtype)) for t in (x, kept))
    if not kept.numel():
        return kept.new_zeros(())
    apart, tiny = x - kept, torch.finfo(kept.dtype).tiny
    of_entry = apart.abs().amax() / kept.abs().amax().clamp_min(tiny)
    of_scale = (apart * kept).sum().abs() / kept.square().sum().clamp_min(tiny)
    return torch.maximum(of_entry / eps**0.5, of_scale / max(2 * eps, 1e-5))
