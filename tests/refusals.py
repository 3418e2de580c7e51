"""Errors that tests expect, as text."""

from __future__ import annotations

import builtins

import pytest


def refusal(text: str):
    """Return a context in which the error must be raised, "TypeError: a pattern of its message"."""
    kind, _, pattern = text.partition(": ")
    return pytest.raises(getattr(builtins, kind), match=pattern)
