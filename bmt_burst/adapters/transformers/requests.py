"""Requests for outputs of enabled models, also through modules with forwards that take none."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class WantedOutputs(enum.Enum):
    """The outputs that a call returns if its arguments do not say it."""

    WHOLE = "whole logits and hidden states"
    WHOLE_FOR_OTHERS = "whole logits and hidden states, since unknown code may read them"
    LOSS_ONLY = "no logits, if the call has targets"


ANY_WHOLE = (WantedOutputs.WHOLE, WantedOutputs.WHOLE_FOR_OTHERS)


# All threads share the open requests: autograd's threads run a forward again in a backward.
_open: list[WantedOutputs | None] = []
_warned: set[str] = set()


@contextmanager
def ask_models(outputs: WantedOutputs | None) -> Iterator[None]:
    """Request outputs from all enabled models that are called in this context. An outer request
    stays in force if it is for WHOLE, or if this one is None.
    """
    asked = find_asked()
    _open.append(asked if outputs is None or asked is WantedOutputs.WHOLE else outputs)
    try:
        yield
    finally:
        _open.pop()


def find_asked() -> WantedOutputs | None:
    """Return the innermost open request, or None."""
    return _open[-1] if _open else None


def warn_once(of: str, text: str) -> None:
    """Warn of something once in this process, whatever the numbers in the text are."""
    if of not in _warned:
        _warned.add(of)
        warnings.warn(text, stacklevel=3)
