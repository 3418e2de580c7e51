"""Ulysses alone."""

from . import UlyssesAttention  # noqa: F401
