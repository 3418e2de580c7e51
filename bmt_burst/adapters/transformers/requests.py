"""Requests for outputs of enabled models. They travel beside a call, because modules around a model
may have forwards that take no other arguments.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class Outputs(enum.Enum):
    """The outputs that a call returns if it does not name them itself."""

    WHOLE = "whole logits and hidden states"
    # what nobody asked for by name
    WHOLE_FOR_OTHERS = "whole logits and hidden states, since unknown code may read them"
    LOSS_ONLY = "no logits, if the call has targets"


ANY_WHOLE = (Outputs.WHOLE, Outputs.WHOLE_FOR_OTHERS)


class _Asked:
    """The request that is open. It is not one of a thread: a backward that computes a forward again
    runs in autograd's threads.
    """

    outputs: Outputs | None = None


_asked = _Asked()
_warned: set[str] = set()


@contextmanager
def ask_models(outputs: Outputs | None) -> Iterator[None]:
    """Ask all enabled models that are called inside for these outputs, or for those of the context
    around this one. A request for whole outputs is also in force in contexts inside of it.
    """
    before = _asked.outputs
    if outputs is not None and before is not Outputs.WHOLE:
        _asked.outputs = outputs
    try:
        yield
    finally:
        _asked.outputs = before


def find_asked() -> Outputs | None:
    """Return the request that is open, if there is one."""
    return _asked.outputs


def warn_once(of: str, text: str) -> None:
    """Warn of something once in this process, whatever the numbers in the text are."""
    if of not in _warned:
        _warned.add(of)
        warnings.warn(text, stacklevel=3)
