"""Ulysses times a ring."""

from .. import LongContextAttention, LongContextAttentionQKVPacked  # noqa: F401
