"""Layers over Ulysses times a ring, and the functions that are named as their kinds of ring."""

from .attn_layer import (
    AsyncLongContextAttention,
    LongContextAttention,
    LongContextAttentionQKVPacked,
)
from .utils import RING_IMPL_DICT, RING_IMPL_QKVPACKED_DICT

__all__ = [
    "RING_IMPL_DICT",
    "RING_IMPL_QKVPACKED_DICT",
    "AsyncLongContextAttention",
    "LongContextAttention",
    "LongContextAttentionQKVPacked",
]
