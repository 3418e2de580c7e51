"""Layers: rotary embedding by explicit positions, SwiGLU, and sequence parallel self-attention.

functions  rotary embedding, SwiGLU
parts      the part of a sequence that a model computes, from its arguments
heads      the base of layers: projections to heads and back, and gates
attention  softmax attention
lightning  lightning attention
"""

from ..sequence.rows import Layouts, Masks
from .attention import BurstAttention
from .functions import apply_rope, rope_frequencies, rope_tables, rotations, swiglu
from .heads import SelfAttention, SequenceParallelModule
from .lightning import LightningAttention
from .parts import Part, find_part

__all__ = [
    "BurstAttention",
    "Layouts",
    "LightningAttention",
    "Masks",
    "Part",
    "SelfAttention",
    "SequenceParallelModule",
    "apply_rope",
    "find_part",
    "rope_frequencies",
    "rope_tables",
    "rotations",
    "swiglu",
]
