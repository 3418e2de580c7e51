"""Choices that are kept while activation checkpointing drops everything else.

A checkpointed function runs again in the backward. To choose again would gather all keys again and
score them. So the first run keeps its choices, and the second takes them in the same order.

Checkpointed functions may be nested. The outer one's recomputation runs the inner one for the first
time again. Then the inner one takes its choices from the outer one.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType

from torch import Tensor


def keep_choices() -> tuple[KeptChoices, KeptChoices]:
    """Return the contexts of a first run and of its recomputation.

    Pass it as `context_fn` to torch.utils.checkpoint.checkpoint(..., use_reentrant=False). All
    ranks of a group must do so, or none.
    """
    kept: list[Tensor] = []
    return KeptChoices(kept, recomputes=False), KeptChoices(kept, recomputes=True)


class KeptChoices:
    """A context in which choices are kept, or taken if it or one around it `recomputes`."""

    def __init__(self, kept: list[Tensor], recomputes: bool):
        self.kept, self.recomputes = kept, recomputes
        self._outer: KeptChoices | None = None
        self._taken = 0
        self._tokens: list[Token[KeptChoices | None]] = []

    def __enter__(self) -> None:
        self._taken = 0
        if not self.recomputes:
            self.kept.clear()
        self._outer = _current.get()
        self._tokens.append(_current.set(self))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._tokens.pop())
        self._outer = None

    @property
    def takes(self) -> bool:
        """Whether calls take the choices of an earlier run."""
        return self.recomputes or (self._outer is not None and self._outer.takes)

    def take(self) -> Tensor:
        """Return the next choice of the first run."""
        if self.recomputes:
            self._taken += 1
            return self.kept[self._taken - 1]
        assert self._outer is not None, "no context recomputes"
        return self._outer.take()

    def keep(self, choice: Tensor) -> None:
        """Keep a choice for the recomputations of this context and of those around it."""
        self.kept.append(choice)
        if self._outer is not None:
            self._outer.keep(choice)


_current: ContextVar[KeptChoices | None] = ContextVar("kept_choices", default=None)


def is_recomputing() -> bool:
    """Whether calls take the choices of an earlier run."""
    current = _current.get()
    return current is not None and current.takes


def take_choice() -> Tensor | None:
    """Return the choice that an earlier run kept for this call, or None if nothing recomputes."""
    current = _current.get()
    return current.take() if current is not None and current.takes else None


def keep_choice(choice: Tensor) -> None:
    """Keep a choice if a recomputation will need it."""
    current = _current.get()
    if current is not None:
        current.keep(choice)
