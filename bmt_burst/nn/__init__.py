"""Layers: rotary embedding by explicit positions, SwiGLU, and sequence parallel self-attention.

rotary     rotary embedding
modules    the base of layers over ranks, caches of generation, SwiGLU
heads      projections to heads and back, and gates
attention  softmax attention
lightning  lightning attention
"""

from ..calls.options import Layouts, Masks
from ..lightning.memory import StateCache
from ..sparse.cache import SparseKVCache
from .attention import BurstAttention, limit_masks
from .heads import SelfAttention
from .lightning import LightningAttention
from .modules import KVCache, SequenceParallelModule, swiglu
from .rotary import apply_rope, rope_frequencies, rope_tables, rotations

__all__ = [
    "BurstAttention",
    "KVCache",
    "Layouts",
    "LightningAttention",
    "Masks",
    "SelfAttention",
    "SequenceParallelModule",
    "SparseKVCache",
    "StateCache",
    "apply_rope",
    "limit_masks",
    "rope_frequencies",
    "rope_tables",
    "rotations",
    "swiglu",
]
