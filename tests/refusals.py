"""Errors that tests expect, as text."""

from __future__ import annotations

import builtins

import pytest


def refusal(text: str):
    """Return a context in which the error must be raised, "TypeError: a pattern of its message"."""
    kind, _, pattern = text.partition(": ")
    return pytest.raises(getattr(builtins, kind), match=pattern)


def refusal_of_rank(wrong: int, rank: int, text: str):
    """Return a context in which `rank` must raise the error of the rank that is wrong.

    The others raise a ValueError that names the rank and its error.
    """
    if rank == wrong:
        return refusal(text)
    kind, _, pattern = text.partition(": ")
    return refusal(f"ValueError: rank {wrong} of the group failed before .*: {kind}: .*{pattern}")
