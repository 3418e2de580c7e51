"""Layers: rotary embedding by explicit positions, SwiGLU, and sequence parallel self-attention.

rotary     rotary embedding
modules    the base of layers over ranks, caches of generation, SwiGLU
attention  softmax attention
"""

from ..calls.options import Layouts, Masks
from ..sparse.cache import SparseKVCache
from .attention import BurstAttention, limit_masks
from .modules import KVCache, SequenceParallelModule, swiglu
from .rotary import apply_rope, rope_frequencies, rope_tables, rotations

__all__ = [
    "BurstAttention",
    "KVCache",
    "Layouts",
    "Masks",
    "SequenceParallelModule",
    "SparseKVCache",
    "apply_rope",
    "limit_masks",
    "rope_frequencies",
    "rope_tables",
    "rotations",
    "swiglu",
]
